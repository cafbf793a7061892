"""What a server is started with to emulate a set-up: checkpoints, sizes, budget."""

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.demo.smollm2 import print_progress
from sglang_nightjar.emulate.checkpoint import Role, prepare_checkpoint
from sglang_nightjar.emulate.scale import SCALE, budget_bytes
from sglang_nightjar.emulate.set_up import Emulated, find_emulated
from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.measured import MeasuredCost
from sglang_nightjar.simulate.protocols import ServerOptions

MODEL_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"  # where SGLang looks for model classes not its own
_CONTEXT = 16_384  # tokens of a request, unless --context-length says otherwise
_NO_LIMIT = 0.98  # SGLang's share of the free memory; the number of slots is what we plan with
_FIXED = {
    "model_path": "the set-up names its models",
    "speculative_draft_model_path": "the set-up names its models",
    "mem_fraction_static": "the set-up names its memory",
    "tp_size": "one process costs what all GPUs of the set-up cost",
    "quantization": "the set-up says what weights take",
    "speculative_draft_model_quantization": "the set-up says what weights take",
    "tokenizer_path": "emulated models have a vocabulary of their own",
}


def find(config: NightjarConfig) -> Emulated:
    """What `config` names, checked with everything else it says about emulation; `UserError` if wrong."""
    from sglang_nightjar.emulate.agreement import read_acceptance

    found = find_emulated(config.emulate)
    if config.resolved_platform() != "cpu":
        raise UserError("--nightjar-emulate runs on the CPU platform; give --nightjar-platform cpu")
    if config.device_memory:
        raise UserError("--nightjar-device-memory: the set-up names its memory; leave it out with --nightjar-emulate")
    if config.draft_bits != NightjarConfig().draft_bits:
        raise UserError("--nightjar-draft-bits is for the demo pair's draft; leave it out with --nightjar-emulate")
    if not found.elastic and config.elastic == "on":
        raise UserError(f"--nightjar-elastic on: {config.emulate} has as many slots without the draft as with it")
    gamma, most = config.policy_spec().gamma, found.forwards.cost.max_gamma
    if isinstance(found.forwards.cost, MeasuredCost) and gamma > most:
        raise UserError(f"{config.emulate} was measured up to gamma {most}: give --nightjar-max-gamma {most}")
    read_acceptance(config.emulate_acceptance)
    return found


def emulated_options(
    config: NightjarConfig, found: Emulated, given: Mapping[str, Any]
) -> tuple[NightjarConfig, dict[str, Any]]:
    """`config` with the emulated device's memory, and `given` with what the set-up says.

    Raises:
        UserError: an option contradicts the set-up.
    """
    set_up = found.set_up
    options = {name: value for name, value in given.items() if value is not None}
    for name, reason in _FIXED.items():
        value = options.get(name)
        if value is not None and not (name == "tp_size" and value == 1):
            raise UserError(f"--{name.replace('_', '-')} {value}: {reason}; leave it out with --nightjar-emulate")
    drafts = not config.policy or config.policy_spec().gamma > 0
    page = options.get("page_size") or 1
    slots = found.slots(resident=drafts) // page * page
    if slots < page:
        raise UserError(f"--nightjar-emulate {set_up.name}: its models leave no room for KV slots")
    most = options.setdefault("max_total_tokens", slots)
    if most > slots:
        raise UserError(f"--max-total-tokens is {most}; {set_up.name} has room for {slots}: choose less")
    options["model_path"] = str(prepare_checkpoint(set_up, Role.TARGET))
    if drafts:
        options["speculative_draft_model_path"] = str(prepare_checkpoint(set_up, Role.DRAFT))
    usual = ServerOptions()
    for name, value in {
        "served_model_name": f"emulated/{set_up.name}",
        "context_length": _CONTEXT,
        "max_running_requests": usual.max_running,
        "chunked_prefill_size": usual.chunk,
        "mem_fraction_static": _NO_LIMIT,
    }.items():
        options.setdefault(name, value)
    print_progress(describe(found, most))
    settled = msgspec.structs.replace(config, device_memory=str(budget_bytes(set_up)))
    return settled if found.elastic else msgspec.structs.replace(settled, elastic="off"), options


def describe(found: Emulated, slots: int) -> str:
    """One line in real sizes, for the log."""
    set_up, cost = found.set_up, found.forwards.cost
    if isinstance(cost, MeasuredCost):
        return f"emulating {cost.points.name}, {slots} KV slots, from {cost.points.source}; byte counts are made up"
    weights = set_up.target.weight_bytes + set_up.draft.weight_bytes
    return (
        f"emulating {set_up.tp} x {set_up.device.name}: {set_up.target.name} with {set_up.draft.name}, "
        f"{weights / 1e9:.1f} GB of weights, {slots} KV slots of {set_up.target.kv_bytes / 1024:.0f} KiB; "
        f"every byte count in logs and /server_info is 1/{SCALE} of the real one"
    )
