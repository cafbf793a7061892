"""A scale model in bytes: every size of a set-up divided by one number, so that capacities stay the real ones.

An emulated model has one layer. K and V of a token are one row of float32 each, together as many bytes as all
layers of the real model take, divided by `SCALE`; its weights are one vector of float32, and the device's
memory is the real budget, divided likewise. Slots of the KV pool, with the draft and without it, are then the set-up's
own (up to the rounding of buffers to pages), and so is what an eviction frees.
"""

from dataclasses import dataclass

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.roofline import Model, SetUp

SCALE = 256
_FLOAT = 4  # bytes
_LEAST_ROW = 3  # floats: what `context_hash.py` keeps of a token
LEAST_KV_BYTES = 2 * _FLOAT * SCALE * _LEAST_ROW  # of a real model's token, all layers; others are multiples of a third


@dataclass(frozen=True, slots=True)
class Size:
    """Of an emulated model, float32 values.

    Attributes:
        weights: its weights.
        row: the K row of one token; the V row is as long.
    """

    weights: int
    row: int

    @property
    def kv_bytes(self) -> int:
        """K and V of one token."""
        return 2 * _FLOAT * self.row

    @property
    def weight_bytes(self) -> int:
        return _FLOAT * self.weights


def scaled(model: Model) -> Size:
    """The emulated size of `model`; `UserError` where its KV of a token cannot be divided into such rows."""
    row, rest = divmod(int(model.kv_bytes), 2 * _FLOAT * SCALE)
    if rest or row < _LEAST_ROW:
        raise UserError(
            f"{model.name} has {model.kv_bytes:g} bytes of KV per token; the emulator needs a multiple of "
            f"{2 * _FLOAT * SCALE}, {LEAST_KV_BYTES} at least; emulate another model"
        )
    return Size(max(1, round(model.weight_bytes / (SCALE * _FLOAT))), row)


def budget_bytes(set_up: SetUp) -> int:
    """Bytes of the emulated device for weights and KV, all GPUs together."""
    return int(set_up.device.memory_bytes * set_up.tp * set_up.mem_fraction / SCALE)
