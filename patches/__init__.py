"""Every hook into SGLang, one module per seam, behind one contract.

`install` runs in each of SGLang's processes. It checks the contract before it touches
anything, so drift ends the start with the name of what changed.
"""

import os
import sys

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.patches.contract import check_contract


def install(config: NightjarConfig) -> None:
    """Checks the contract and installs every hook this configuration needs.

    Raises:
        ContractError: an upstream name is missing or has other parameters.
    """
    check_contract()
    if config.resolved_platform() == "cpu":
        from sglang_nightjar.patches import choices, slots

        choices.install()
        slots.install()


def install_or_exit(config: NightjarConfig) -> None:
    """`install`, ending the process on failure (SGLang would swallow the exception and serve on)."""
    try:
        install(config)
    except Exception as error:
        print(f"[nightjar] error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
