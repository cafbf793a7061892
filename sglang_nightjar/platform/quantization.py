"""Weight-only quantization on the CPU platform: `nightjar_w8` ... `nightjar_w3`.

Meant for drafts: `--speculative-draft-model-quantization nightjar_w8` turns a float32
checkpoint, while it loads, into its quantized twin. Fewer bits cost acceptance, so the
number of bits is also how tests and benchmarks dial acceptance.
"""

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_nightjar.kernels.int8_linear import Int8Linear, quantize_weight
from sglang_nightjar.platform.names import QUANTIZATION

# At 4 bits and below one scale per output channel loses too much; scale groups of inputs instead.
_GROUP_SIZE = {8: 0, 7: 0, 6: 0, 5: 0, 4: 64, 3: 64}


class WeightOnlyConfig(QuantizationConfig):
    """SGLang's view of one width; the class itself is the registry entry (`bits` is per subclass)."""

    name: str
    bits: int

    def get_name(self) -> str:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WeightOnlyConfig":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            return WeightOnlyLinearMethod(self.bits)
        if isinstance(layer, VocabParallelEmbedding):
            return WeightOnlyEmbeddingMethod(self.bits)
        return None

    def get_scaled_act_names(self) -> list[str]:
        return []


class _WeightOnly:
    """Quantizes `layer.weight` (float32 [N, K]) into `layer.q` (int8 [N, K]) and `layer.scale` (float32 [N, G])."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        group = _GROUP_SIZE[self.bits]
        if group and weight.shape[1] % group:
            group = 0
        quantized = quantize_weight(weight, self.bits, group)
        layer.register_buffer("q", quantized.q, persistent=False)
        layer.register_buffer("scale", quantized.scale, persistent=False)
        self.weights_moved(layer)
        layer.weight_shape = weight.shape
        layer.weight.data = weight.new_empty(0)  # the float copy is not used again

    def weights_moved(self, layer: Any) -> None:
        """`layer.q` and `layer.scale` lie elsewhere now, or hold values again (`memory/draft_store.py`)."""
        layer.int8 = Int8Linear(layer.q, layer.scale)

    def restore_weights_before_loading(self, layer: Any) -> None:
        layer.weight.data = torch.empty(layer.weight_shape, dtype=torch.float32)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.int8(x, bias)


class WeightOnlyLinearMethod(_WeightOnly, UnquantizedLinearMethod):
    """Quantized linear layer."""


class WeightOnlyEmbeddingMethod(_WeightOnly, UnquantizedEmbeddingMethod):
    """Quantized embedding and language-model head in one (they may be tied)."""

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        rows = layer.q[input_].to(torch.float32)
        scale = layer.scale[input_]
        return (rows.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)


QUANTIZATION_METHODS: dict[str, type[WeightOnlyConfig]] = {
    name: type(f"WeightOnlyW{bits}Config", (WeightOnlyConfig,), {"bits": bits, "name": name})
    for name, bits in QUANTIZATION.items()
}
