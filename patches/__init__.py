"""Every hook into SGLang, one module per seam, behind one contract.

A Nightjar server's first process checks the contract (`contract.check_contract`), then
every process it starts installs the hooks it needs. SGLang logs and swallows what fails
while hooks are applied, so the worker asks `verify_installed` before it serves.
"""

import os
import sys

from sglang_nightjar.config import NightjarConfig


def install(config: NightjarConfig) -> None:
    """Installs every hook this configuration needs in this process."""
    if config.resolved_platform() == "cpu":
        from sglang_nightjar.patches import choices, finish, seeded_sampling, slots

        choices.install()
        finish.install()
        seeded_sampling.install()
        slots.install()


def install_or_exit(config: NightjarConfig) -> None:
    """`install`, ending the process on failure: SGLang would swallow the exception and serve half-patched."""
    try:
        install(config)
    except Exception as error:
        print(f"[nightjar] error: cannot install the hooks into SGLang: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def verify_installed() -> None:
    """Makes sure that SGLang applied the hooks registered by `install`.

    Raises:
        RuntimeError: it did not; the message names the target.
    """
    from sglang_nightjar.patches import finish, seeded_sampling, slots

    for hook in (finish, seeded_sampling, slots):
        hook.verify()
