"""Every hook into SGLang, one module per seam, behind one contract.

A Nightjar server's first process checks the contract (`contract.check_contract`), then
every process it starts installs the hooks it needs. SGLang logs and swallows what fails
while hooks are applied, so the worker asks `verify_installed` before it serves.
"""

import os
import sys
from typing import Any

from sglang_nightjar.config import NightjarConfig


def install(config: NightjarConfig) -> None:
    """Installs every hook this configuration needs in this process."""
    if config.resolved_platform() == "cpu":
        from sglang_nightjar.patches import choices

        choices.install()
        for hook in _worker_hooks():
            hook.install()


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
    for hook in _worker_hooks():
        hook.verify()


def _worker_hooks() -> tuple[Any, ...]:
    """The modules whose hooks the processes that compute need."""
    from sglang_nightjar.patches import (
        admin,
        elastic,
        finish,
        lockstep,
        outcome,
        reserve,
        seeded_sampling,
        server_info,
        slots,
    )

    return admin, elastic, finish, lockstep, outcome, reserve, seeded_sampling, server_info, slots
