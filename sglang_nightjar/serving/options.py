"""Completes the options a user gave: demo models, platform defaults, speculation settings.

Options are SGLang's `ServerArgs` field names. Only what the user left open is filled in.
"""

from collections.abc import Mapping
from typing import Any

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.registry import FIRST_GAMMA
from sglang_nightjar.serving.support import flag

# SGLang's names for "what runs on a CPU without its own CPU engine".
_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "nightjar_cpu",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "chunked_prefill_size": 2048,
    "max_running_requests": 48,
    "sleep_on_idle": True,  # an idle scheduler would otherwise poll on a core of its own
}


def complete_options(config: NightjarConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` plus everything that follows from it and from `config`.

    Raises:
        UserError: options contradict each other, or one needs another that is missing.
    """
    options = {name: value for name, value in given.items() if value is not None}
    quantized_demo = "model_path" not in options and _serve_demo_pair(config, options)
    if config.draft_bits != NightjarConfig().draft_bits and not quantized_demo:
        raise UserError(
            f"--nightjar-draft-bits {config.draft_bits} is for the demo pair's draft, which is not served here; "
            f"another draft takes --speculative-draft-model-quantization nightjar_w{config.draft_bits}"
        )
    _settle_speculation(config, options)
    if config.resolved_platform() == "cpu":
        if options.get("dtype") == "auto":
            del options["dtype"]
        options = {**_CPU_DEFAULTS, **options}
    options.pop("disable_overlap_schedule", None)  # SGLang's flag can only turn it off
    if _without_overlap(config, given):
        options["disable_overlap_schedule"] = True
    return options


def _without_overlap(config: NightjarConfig, given: Mapping[str, Any]) -> bool:
    """Whether SGLang's overlap scheduling is off."""
    asked = given.get("disable_overlap_schedule")
    if config.resolved_platform() == "cuda" and config.own_worker():
        if config.overlap == "on" or asked is False:
            raise UserError(
                "overlap scheduling is not supported by Nightjar's own worker on a GPU; leave out --nightjar-overlap on"
            )
        return True
    if config.overlap == "auto":
        return config.resolved_platform() == "cpu" if asked is None else bool(asked)
    off = config.overlap == "off"
    if asked is not None and asked != off:
        raise UserError(
            f"--nightjar-overlap {config.overlap} and disable_overlap_schedule={asked} disagree; give one of them"
        )
    return off


def _serve_demo_pair(config: NightjarConfig, options: dict[str, Any]) -> bool:
    """Fills in the demo models; returns whether `config.draft_bits` sets the draft's weights."""
    from sglang_nightjar.demo.smollm2 import MODEL_NAME, prepare_demo_model

    target = str(prepare_demo_model())
    options["model_path"] = target
    options.setdefault("served_model_name", MODEL_NAME)
    if config.policy and config.policy_spec().gamma == 0:
        return False
    options.setdefault("speculative_draft_model_path", target)
    if options["speculative_draft_model_path"] != target or "speculative_draft_model_quantization" in options:
        return False
    if config.resolved_platform() != "cpu":
        return False  # the quantized kernels are a CPU's: here the draft is the target itself
    options["speculative_draft_model_quantization"] = f"nightjar_w{config.draft_bits}"
    return True


def _settle_speculation(config: NightjarConfig, options: dict[str, Any]) -> None:
    """Turns the policy into SGLang's speculation flags, or the flags into gamma, and checks that they agree."""
    gamma = _gamma(config, options)
    draft = options.get("speculative_draft_model_path")
    if gamma == 0:
        if draft is not None:
            raise UserError(
                f"--nightjar-policy {config.policy} never speculates; leave out --speculative-draft-model-path"
            )
        _require_no_speculation(options, f"--nightjar-policy {config.policy} never speculates; leave it out")
        return
    if draft is None:
        missing = "give --speculative-draft-model-path (or no --model-path, to serve the demo pair)"
        if config.policy:
            raise UserError(f"--nightjar-policy {config.policy} needs a draft; {missing}")
        if options.get("speculative_algorithm", "STANDALONE").upper() == "STANDALONE":
            _require_no_speculation(options, missing)
        return
    options["speculative_num_steps"] = gamma
    options.setdefault("speculative_algorithm", "STANDALONE")
    options.setdefault("speculative_eagle_topk", 1)
    options.setdefault("speculative_num_draft_tokens", gamma + 1)
    if options["speculative_num_draft_tokens"] != gamma + 1:
        raise UserError(
            f"--speculative-num-draft-tokens is {options['speculative_num_draft_tokens']}; a chain of {gamma} drafts "
            f"verifies {gamma + 1} tokens, so leave it out or give {gamma + 1}"
        )


def _gamma(config: NightjarConfig, options: Mapping[str, Any]) -> int:
    """The most tokens to draft per step: the policy's, else SGLang's flag; 0 means no speculation."""
    steps = options.get("speculative_num_steps")
    if steps is not None and not 1 <= steps <= config.max_gamma:
        raise UserError(
            f"--speculative-num-steps is {steps}; choose 1 to --nightjar-max-gamma ({config.max_gamma}), "
            "raise --nightjar-max-gamma, or give --nightjar-policy off for no speculation"
        )
    spec = config.policy_spec()
    if not config.policy and steps is not None:
        return int(steps)
    if not config.policy and not config.own_worker():
        return min(FIRST_GAMMA, config.max_gamma)  # a fixed gamma, by SGLang's own worker
    gamma = spec.gamma
    if steps is not None and steps != gamma:
        raise UserError(
            f"--speculative-num-steps {steps} and --nightjar-policy {config.policy} disagree; give one of them"
        )
    return gamma


def _require_no_speculation(options: Mapping[str, Any], instead: str) -> None:
    """Without a draft SGLang would quietly ignore its speculation flags."""
    for name, value in options.items():
        if name.startswith("speculative_"):
            raise UserError(f"{flag(name)} {value} has no draft to work on; {instead}")
