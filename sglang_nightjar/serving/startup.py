"""The way both front doors (command line and `Engine`) take to a ready SGLang configuration."""

from collections.abc import Mapping
from typing import Any

from sglang_nightjar.config import NightjarConfig, hand_to_children
from sglang_nightjar.errors import UserError
from sglang_nightjar.patches.contract import check_contract
from sglang_nightjar.platform.names import PLATFORM
from sglang_nightjar.platform.threads import set_thread_environment
from sglang_nightjar.serving.checkpoints import check_checkpoints
from sglang_nightjar.serving.options import complete_options
from sglang_nightjar.serving.support import refuse_unsupported


def activate(config: NightjarConfig, *, ranks: int) -> None:
    """Makes this process, and every process it starts, part of a Nightjar server.

    Must run before SGLang decides on its platform, and installs the hooks here; children
    install theirs when SGLang loads its plugins.

    Raises:
        ContractError: the installed SGLang is not the one this code was written for.
        UserError: SGLang has already chosen another platform in this process.
    """
    check_contract()
    on_cpu = config.resolved_platform() == "cpu"
    if on_cpu:
        set_thread_environment(config, ranks)
    hand_to_children(config)

    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.platforms import current_platform

    if on_cpu and current_platform.device_name != PLATFORM:
        raise UserError(
            "SGLang was imported before Nightjar and has chosen another platform; "
            "import sglang_nightjar first, or start the server with python -m sglang_nightjar.launch_server"
        )


def server_options(config: NightjarConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything SGLang is to be started with: `given`, completed and checked.

    Raises:
        UserError: something is unsupported, contradictory, missing or too large.
    """
    on_cpu = config.resolved_platform() == "cpu"
    options = complete_options(config, given)
    refuse_unsupported(options, on_cpu=on_cpu)
    if on_cpu:
        options.update(check_checkpoints(options))
    return options
