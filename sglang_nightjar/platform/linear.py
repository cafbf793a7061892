"""Float32 linears of the CPU platform: weights prepacked for oneDNN once, after loading."""

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_nightjar.kernels.packed_linear import PackedLinear


class PrepackedLinearMethod(UnquantizedLinearMethod):
    """A linear layer that multiplies by a oneDNN copy of its weight.

    The plain weight stays, so that SGLang's weight updates keep working: after one it
    calls `process_weights_after_loading`, which packs anew.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = PackedLinear(layer.weight.data)

    def weights_moved(self, layer: torch.nn.Module) -> None:
        """`layer.weight` holds values again (`memory/draft_store.py`)."""
        self.process_weights_after_loading(layer)

    def weights_gone(self, layer: Any) -> None:
        """The packed copy goes with the weight it was made of."""
        layer.packed = None

    def derived_bytes(self, layer: torch.nn.Module) -> int:
        """What the packed copy takes, its padding aside."""
        return int(layer.weight.numel() * layer.weight.element_size())

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = layer.packed(x)
        return out if bias is None else out + bias


class PrepackedHeadMethod(UnquantizedEmbeddingMethod):
    """The same for the language-model head, which may be the embedding itself (tied weights)."""

    process_weights_after_loading = PrepackedLinearMethod.process_weights_after_loading
    weights_moved = PrepackedLinearMethod.weights_moved
    weights_gone = PrepackedLinearMethod.weights_gone
    derived_bytes = PrepackedLinearMethod.derived_bytes
    apply = PrepackedLinearMethod.apply


def prepack_linears(model: torch.nn.Module) -> None:
    """Gives every unquantized float32 linear of `model`, and its head, a prepacked weight."""
    for module in model.modules():
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            _prepack(module, PrepackedLinearMethod())
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabParallelEmbedding) and type(head.quant_method) is UnquantizedEmbeddingMethod:
        _prepack(head, PrepackedHeadMethod())


def _prepack(module: Any, method: Any) -> None:
    if module.weight.dtype != torch.float32 or module.weight.dim() != 2:
        return  # other dtypes keep SGLang's plain matmul
    module.quant_method = method
    method.process_weights_after_loading(module)
