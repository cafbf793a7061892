"""The way both front doors (command line and `Engine`) take to a ready SGLang configuration."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_nightjar.config import NightjarConfig, hand_to_children, inherited_config
from sglang_nightjar.coordination.transport import make_run_folder
from sglang_nightjar.errors import UserError
from sglang_nightjar.patches.contract_check import check_contract
from sglang_nightjar.platform.names import PLATFORM, TREE_CORE, TREE_CORE_VARIABLE
from sglang_nightjar.platform.threads import set_thread_environment
from sglang_nightjar.serving.checkpoints import check_checkpoints, check_vocabularies
from sglang_nightjar.serving.options import complete_options
from sglang_nightjar.serving.support import flag, refuse_unsupported

# Set by a user, each of these makes SGLang load another platform, or other plugins, than ours.
PLATFORM_VARIABLES = ("SGLANG_PLATFORM", "SGLANG_PLUGINS")


def activate(config: NightjarConfig, *, ranks: int) -> None:
    """Makes this process, and every process it starts, part of a Nightjar server.

    Must run before SGLang decides on its platform, and installs the hooks here; children
    install theirs when SGLang loads its plugins.

    Raises:
        ContractError: the installed SGLang is not the one this code was written for.
        UserError: the platform asked for is not there, or SGLang has already chosen another in this process.
    """
    check_contract()
    on_cpu = config.resolved_platform() == "cpu"
    if config.emulate:
        from sglang_nightjar.emulate import options as emulation

        emulation.find(config)
        os.environ[emulation.MODEL_PACKAGE] = emulation.__package__
        # Its arithmetic is nothing; the other cores are for the processes that talk to clients.
        config = msgspec.structs.replace(config, threads=config.threads or 1)
    if on_cpu:
        set_thread_environment(config, ranks)
        _silence_gpu_warnings()
    else:
        _check_gpu(config)
    hand_to_children(config)
    if ranks > 1:
        make_run_folder()

    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.platforms import current_platform

    if config.own_worker() and not _ours(current_platform, on_cpu=on_cpu):
        raise UserError(_platform_remedy())


def _ours(platform: Any, *, on_cpu: bool) -> bool:
    """Whether SGLang has taken our platform."""
    if on_cpu:
        return bool(platform.device_name == PLATFORM)
    from sglang_nightjar.platform.cuda import NightjarCudaPlatform

    return isinstance(platform, NightjarCudaPlatform)


def _silence_gpu_warnings() -> None:
    """Every process SGLang starts would warn of each GPU library a CPU does without."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")


def _check_gpu(config: NightjarConfig) -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("--nightjar-platform cuda: this machine has no usable CUDA device; use cpu or auto")
    if config.own_worker() and torch.version.hip is not None:
        raise UserError(
            "Nightjar's own worker is written for NVIDIA GPUs; give --nightjar-policy static:N and leave out "
            "--nightjar-elastic on"
        )


def _platform_remedy() -> str:
    for name in PLATFORM_VARIABLES:
        if "nightjar" not in os.environ.get(name, "nightjar"):
            return f"{name}={os.environ[name]} keeps Nightjar's platform out; unset it, or add nightjar to it"
    return (
        "SGLang has already chosen another platform in this process, or this package is not installed in this "
        "environment; start with python -m sglang_nightjar.launch_server, or import sglang_nightjar before sglang, "
        "after pip install"
    )


def server_options(config: NightjarConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything SGLang is to be started with: `given`, completed and checked.

    Raises:
        UserError: something is unsupported, contradictory, missing or too large.
    """
    on_cpu = config.resolved_platform() == "cpu"
    own_worker = config.own_worker()
    refuse_unsupported(given, on_cpu=on_cpu, own_worker=own_worker)  # before a demo model is converted for nothing
    if config.emulate:
        from sglang_nightjar.emulate import options as emulation

        config, given = emulation.emulated_options(config, emulation.find(config), given)
    options = complete_options(config, given)
    steps = given.get("speculative_num_steps")
    if not config.policy and steps is not None:
        # SGLang's own flag keeps its meaning: so many drafts, always.
        config = msgspec.structs.replace(config, policy=f"static:{steps}")
    _check_journal(config)
    config = msgspec.structs.replace(config, overlap="off" if options.get("disable_overlap_schedule") else "on")
    hand_to_children(_settle_elastic(config, options, on_cpu=on_cpu))
    refuse_unsupported(options, on_cpu=on_cpu, own_worker=own_worker)
    check_ranges(options)
    if on_cpu and not config.emulate:
        options.update(check_checkpoints(options, config.device_bytes()))
    if own_worker and not on_cpu:
        check_vocabularies(options)
    return options


def _check_journal(config: NightjarConfig) -> None:
    if not config.journal:
        return
    try:
        config.journal_path.open("ab").close()
    except OSError as error:
        raise UserError(f"--nightjar-journal {config.journal}: {error.strerror}; give a writable file") from None


def _settle_elastic(config: NightjarConfig, options: Mapping[str, Any], *, on_cpu: bool) -> NightjarConfig:
    """`config` with elastic memory off where this server cannot have it; `UserError` where it was insisted on."""
    if not on_cpu and config.device_memory:
        raise UserError("--nightjar-device-memory is a budget of the CPU platform; on a GPU use --mem-fraction-static")
    if not on_cpu and config.elastic != "on":
        return msgspec.structs.replace(config, elastic="off")  # never by itself where it has never been run
    chosen = os.environ.get(TREE_CORE_VARIABLE)
    quantized = options.get("speculative_draft_model_quantization")
    reasons = {
        f"cannot move a draft's {quantized} weights on a GPU: leave out --speculative-draft-model-quantization": (
            not on_cpu and quantized not in (None, "unquant")
        ),
        "moves a draft, and none is served": options.get("speculative_draft_model_path") is None,
        "needs prompts in chunks: leave out --chunked-prefill-size -1": options.get("chunked_prefill_size") == -1,
        f"needs SGLang's Rust radix tree: unset {TREE_CORE_VARIABLE}": chosen not in (None, TREE_CORE),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None or not config.wants_elastic():
        return config
    if config.elastic == "on":
        raise UserError(f"--nightjar-elastic on {reason}; or leave it out")
    return msgspec.structs.replace(config, elastic="off")


def check_ranges(options: Mapping[str, Any]) -> None:
    """Refuses sizes on which SGLang's scheduler process would fail after loading the models."""
    for name in ("tp_size", "max_running_requests", "page_size", "max_prefill_tokens", "prefill_max_requests"):
        value = options.get(name)
        if value is not None and value < 1:
            raise UserError(f"{flag(name)} is {value}; choose 1 or more")
    chunk, page = options.get("chunked_prefill_size"), options.get("page_size") or 1
    if chunk is not None and chunk != -1 and (chunk < 1 or chunk % page):
        raise UserError(
            f"--chunked-prefill-size is {chunk}; choose a multiple of --page-size ({page}), or -1 for no chunks"
        )


def guard_requests(config: NightjarConfig) -> None:
    """Last step before serving: this process will turn away requests on which our platform or worker would fail."""
    settled = inherited_config() or config
    on_cpu = settled.resolved_platform() == "cpu"
    if on_cpu or settled.own_worker():
        from sglang_nightjar.patches import admin, requests

        elastic = settled.wants_elastic()
        requests.install(elastic=elastic, on_cpu=on_cpu)
        if elastic:
            admin.add_routes()
