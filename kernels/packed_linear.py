"""A float32 linear layer with a weight that oneDNN has rearranged once, on the CPU.

A plain linear reads its weight in the layout it was stored in: one row of x takes a
matrix-vector path, two to a few dozen rows take a matrix-matrix path that costs more than
twice as much. With the weight laid out for oneDNN's own kernel the cost hardly changes between 1
and 4 rows, and verifying a few drafted tokens costs what decoding one token does.
"""

from __future__ import annotations

import torch

# The layout oneDNN picks depends on the number of rows it is told to expect. A hint of 1 gives
# one that is poor for every other number; 8, 16, 64 give the same one, which is at least as
# fast as a plain linear for 1 to 2048 rows. So: one layout, used for every number of rows.
BATCH_HINT = 16


def packed_linear_available() -> bool:
    """Whether this build of torch has oneDNN and the operators that `PackedLinear` needs."""
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


class PackedLinear:
    """`torch.nn.functional.linear` for one fixed weight, without gradients.

    Keeps its own rearranged copy, as large as the weight (each dimension padded to a few
    dozen elements), and no reference to the original: free that one where nothing else needs
    it. A tied embedding does. Later changes to the weight are not seen.

    Which rows share a call does not change a row's result: with this layout oneDNN sums over K
    in the same order for 1 to 2048 rows, bit for bit, on the AVX2 machines and shapes tested.
    oneDNN does not promise it. (A plain linear takes other paths for 1, 2, 3, 5... rows; results
    of order 1 then differ by 2e-6.)

    Args:
        weight: float32 [N, K].
        bias: float32 [N] or None.
    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
        RuntimeError: torch was built without oneDNN.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if not packed_linear_available():
            raise RuntimeError("this build of torch lacks mkldnn::_reorder_linear_weight or mkldnn::_linear_pointwise")
        if weight.dtype != torch.float32 or weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"weight must be a non-empty float32 matrix, not {weight.dtype} {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (self.out_features,)):
            raise ValueError(f"bias must be float32 [{self.out_features}], not {bias.dtype} {list(bias.shape)}")
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BATCH_HINT)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., K] to float32 [..., N]."""
        if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be float32 [..., {self.in_features}], not {x.dtype} {list(x.shape)}")
        return self._linear(x, self._packed, self.bias, "none", [], "")


def packed_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch and double precision."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
