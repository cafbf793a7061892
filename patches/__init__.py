"""Every hook into SGLang, one module per seam, behind one contract.

A Nightjar server's first process checks the contract (`contract_check.check_contract`), then
every process it starts installs the hooks it needs. SGLang logs and swallows what fails
while hooks are applied, so the worker asks `verify_installed` before it serves.
"""

import os
import sys
from typing import Any

from sglang_nightjar.config import NightjarConfig, inherited_config


def install(config: NightjarConfig) -> None:
    """Installs every hook this configuration needs in this process."""
    if config.resolved_platform() == "cpu":
        from sglang_nightjar.patches import choices

        choices.install()
    for hook in _worker_hooks(config):
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
    config = inherited_config()
    assert config is not None, "hooks are a Nightjar server's"
    for hook in _worker_hooks(config):
        hook.verify()


def _worker_hooks(config: NightjarConfig) -> tuple[Any, ...]:
    """The modules whose hooks the processes that compute need; none where SGLang's own worker serves."""
    if not config.own_worker():
        return ()
    from sglang_nightjar.patches import (
        admin,
        elastic,
        finish,
        lockstep,
        meta_info,
        outcome,
        reserve,
        retractions,
        server_info,
    )

    hooks = admin, elastic, finish, lockstep, meta_info, outcome, reserve, retractions, server_info
    if config.resolved_platform() == "cpu":
        from sglang_nightjar.patches import overlap, seeded_sampling, slots

        return *hooks, overlap, seeded_sampling, slots
    from sglang_nightjar.patches import spec_worker

    return *hooks, spec_worker
