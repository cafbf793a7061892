"""Completes the options a user gave: demo models, platform defaults, speculation settings.

Options are SGLang's `ServerArgs` field names. Only what the user left open is filled in.
"""

from collections.abc import Mapping
from typing import Any

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.errors import UserError

# SGLang's names for "what runs on a CPU without its own CPU engine".
_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "nightjar_cpu",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "chunked_prefill_size": 2048,
    "max_running_requests": 48,
    "sleep_on_idle": True,  # an idle scheduler would otherwise poll on a core of its own
}
_DEMO_GAMMA = 3


def complete_options(config: NightjarConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` plus everything that follows from it and from `config`.

    Raises:
        UserError: options contradict each other.
    """
    options = dict(given)
    if "model_path" not in options:
        _serve_demo_pair(config, options)
    _settle_speculation(config, options)
    if config.resolved_platform() == "cpu":
        for name, value in _CPU_DEFAULTS.items():
            options.setdefault(name, value)
    return options


def _serve_demo_pair(config: NightjarConfig, options: dict[str, Any]) -> None:
    from sglang_nightjar.demo import prepare_demo_model

    target = str(prepare_demo_model())
    options["model_path"] = target
    options.setdefault("served_model_name", "SmolLM2-135M-Instruct")
    if config.policy and config.policy_spec().gamma == 0:
        return
    options.setdefault("speculative_draft_model_path", target)
    if options["speculative_draft_model_path"] == target:
        options.setdefault("speculative_draft_model_quantization", f"nightjar_w{config.draft_bits}")
    if not config.policy:
        options.setdefault("speculative_num_steps", min(_DEMO_GAMMA, config.max_gamma))


def _settle_speculation(config: NightjarConfig, options: dict[str, Any]) -> None:
    """Turns the policy into SGLang's speculation flags, or the flags into gamma, and checks that they agree."""
    draft = options.get("speculative_draft_model_path")
    steps = options.get("speculative_num_steps")
    if steps is not None and not 1 <= steps <= config.max_gamma:
        raise UserError(
            f"--speculative-num-steps is {steps}; choose 1 to --nightjar-max-gamma ({config.max_gamma}), "
            "or raise --nightjar-max-gamma"
        )
    if config.policy:
        gamma = config.policy_spec().gamma
        if steps is not None and steps != gamma:
            raise UserError(
                f"--speculative-num-steps {steps} and --nightjar-policy {config.policy} disagree; give one of them"
            )
        if gamma == 0:
            if draft is not None:
                raise UserError(
                    f"--nightjar-policy {config.policy} never speculates; leave out --speculative-draft-model-path"
                )
            return
        if draft is None:
            raise UserError(
                f"--nightjar-policy {config.policy} needs a draft; give --speculative-draft-model-path "
                "(or no --model-path, to serve the demo pair)"
            )
        options["speculative_num_steps"] = steps = gamma
    if draft is None:
        return
    options.setdefault("speculative_algorithm", "STANDALONE")
    if steps is None:
        options["speculative_num_steps"] = steps = min(_DEMO_GAMMA, config.max_gamma)
    options.setdefault("speculative_eagle_topk", 1)
    options.setdefault("speculative_num_draft_tokens", steps + 1)
    if options["speculative_num_draft_tokens"] != steps + 1:
        raise UserError(
            f"--speculative-num-draft-tokens is {options['speculative_num_draft_tokens']}; a chain of {steps} drafts "
            f"verifies {steps + 1} tokens, so leave it out or give {steps + 1}"
        )
