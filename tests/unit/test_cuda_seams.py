"""How a server on a GPU gets our worker: which hooks, which platform, and what a model may not be. No GPU is needed."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_nightjar import plugin
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.errors import UserError
from sglang_nightjar.patches import spec_worker
from sglang_nightjar.speculation import cuda_limits

PROGRAM = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.platforms import current_platform
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_nightjar.patches import verify_installed
verify_installed()
worker = SpeculativeAlgorithm.STANDALONE.get_platform_worker_cls()
print(type(current_platform).__name__, current_platform.is_out_of_tree(), current_platform.is_cuda(),
      worker and worker.__name__, SpeculativeAlgorithm.EAGLE.get_platform_worker_cls())
"""


def in_process_of(config: NightjarConfig) -> str:
    """What `PROGRAM` prints in a process of a server with this configuration."""
    environment = {**os.environ, "SGLANG_NIGHTJAR_HANDOFF": msgspec.json.encode(config).decode()}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1]


def test_sglang_hands_out_our_worker() -> None:
    """Through SGLang's own plugins, hooks and platform discovery; CUDA stays a platform of its tree."""
    found = in_process_of(NightjarConfig(platform="cuda", policy="nightjar"))
    assert found == "NightjarCudaPlatform False True CudaStandaloneWorker None"


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        (NightjarConfig(platform="cuda"), False),
        (NightjarConfig(platform="cuda", policy="off"), False),
        (NightjarConfig(platform="cuda", policy="static:3"), False),
        (NightjarConfig(platform="cuda", policy="nightjar"), True),
        (NightjarConfig(platform="cuda", policy="sglang-ema"), True),
        (NightjarConfig(platform="cuda", policy="static:3", elastic="on"), True),
        (NightjarConfig(platform="cuda", elastic="on"), True),
        (NightjarConfig(platform="cpu"), True),
        (NightjarConfig(platform="cpu", policy="off"), True),
    ],
)
def test_on_a_gpu_only_what_needs_it_gets_it(
    config: NightjarConfig, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_NIGHTJAR_HANDOFF", msgspec.json.encode(config).decode())
    assert config.own_worker() is ours
    assert (plugin.platform() is not None) is ours


def test_other_algorithms_keep_their_worker() -> None:
    asked: list[Any] = []
    assert spec_worker.hand_out_ours(asked.append, SpeculativeAlgorithm.EAGLE3) is None  # type: ignore[func-returns-value]
    assert asked == [SpeculativeAlgorithm.EAGLE3]


def runner(**changes: Any) -> Any:
    """What `check_models` and `check_backends` ask of a model runner."""
    config = {
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "is_multimodal": False,
        "model_path": "/model",
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
    }
    own = {"is_hybrid_swa": False, "prefill_attention_backend_str": "fa3", "decode_attention_backend_str": "fa3"}
    config |= {name: value for name, value in changes.items() if name in config}
    own |= {name: value for name, value in changes.items() if name in own}
    return SimpleNamespace(model_config=SimpleNamespace(**config), **own)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_arch": AttentionArch.MLA}, "is not a decoder with multi-head"),
        ({"is_hybrid_swa": True}, "has sliding-window layers"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"is_multimodal": True}, "reads more than text"),
    ],
)
def test_models_that_need_more_are_refused(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_limits, "mambaish_config", lambda config: None)
    cuda_limits.check_models(runner())
    with pytest.raises(UserError, match=f"/model {reason}.*--nightjar-policy static:N"):
        cuda_limits.check_models(runner(**changes))


def test_models_with_state_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_limits, "mambaish_config", lambda config: object())
    with pytest.raises(UserError, match="state-space or linear-attention layers"):
        cuda_limits.check_models(runner())


def test_backends_nobody_has_read_are_refused() -> None:
    cuda_limits.check_backends(
        runner(prefill_attention_backend_str="flashinfer", decode_attention_backend_str="triton")
    )
    with pytest.raises(UserError, match="the attention backend is trtllm_mha; .* --attention-backend"):
        cuda_limits.check_backends(runner(decode_attention_backend_str="trtllm_mha"))


def test_weights_that_lie_transposed_are_refused() -> None:
    """Moving them onto an arena would change their strides, which a kernel may count on."""
    model = torch.nn.Linear(4, 8, bias=False)
    cuda_limits.check_movable(SimpleNamespace(model=model))
    model.weight = torch.nn.Parameter(model.weight.data.t())
    with pytest.raises(UserError, match=r"the draft's weight is not contiguous \(strides \(1, 4\)\)"):
        cuda_limits.check_movable(SimpleNamespace(model=model))
