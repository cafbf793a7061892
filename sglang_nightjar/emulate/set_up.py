"""What `--nightjar-emulate` names: a set-up of `simulate/setups.py`, or a file of a real server's measured steps.

A file (`simulate/measured.py`; `python -m sglang_nightjar.simulate --measure` makes one) says how many KV slots the
server had and not how large anything was: `made_up` invents bytes that give those numbers of slots.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from sglang_nightjar.emulate.forwards import Forwards, MeasuredForwards, RooflineForwards
from sglang_nightjar.emulate.scale import LEAST_KV_BYTES, SCALE
from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.measured import Measured, read_measured
from sglang_nightjar.simulate.roofline import Device, Model, SetUp, StepCost
from sglang_nightjar.simulate.setups import SET_UPS

_FILE = ".json"
_WEIGHT = 4 * SCALE  # bytes of one emulated weight
_FEW = 256 * _WEIGHT  # bytes of a model whose weights do not matter
_KV_UNITS = 16  # least KV of a token, in `LEAST_KV_BYTES`: with less, a page of memory would hold too many slots
_LEAST_LINK_S = 1e-3  # a reload that was not measured takes this long


@dataclass(frozen=True, slots=True)
class Emulated:
    """What is emulated.

    Attributes:
        set_up: names and sizes. forwards: what forwards take.
        elastic: whether it is known how large the pool is without the draft.
    """

    set_up: SetUp
    forwards: Forwards
    elastic: bool = True

    def slots(self, resident: bool) -> int:
        """KV slots of the pool, with or without the draft."""
        return self.forwards.cost.slots(resident)


def find_emulated(text: str) -> Emulated:
    """What `text` names; `UserError` where it names nothing, or a file that cannot be read."""
    if text.endswith(_FILE):
        cost = read_measured(Path(text))
        points = cost.points
        return Emulated(made_up(points), MeasuredForwards(cost), points.slots_evicted > points.slots_resident)
    set_up = SET_UPS.get(text)
    if set_up is None:
        raise UserError(
            f"--nightjar-emulate {text!r} is unknown; use one of: {', '.join(SET_UPS)}, or a {_FILE} file of --measure"
        )
    return Emulated(set_up, RooflineForwards(StepCost(set_up)))


def made_up(points: Measured) -> SetUp:
    """A set-up with the slots of `points`. Where those with and without a draft are equal, so is only the first."""
    small, large = points.slots_resident, points.slots_evicted
    # The draft's weights are what is missing in the smaller pool; they must not come out negative.
    ratio = small // (large - small) + 1 if large > small else 1
    unit = LEAST_KV_BYTES * max(1, _KV_UNITS // ratio)
    target_kv, draft_kv = ratio * unit, unit
    per_slot = target_kv + draft_kv
    if large > small:
        room = large * target_kv + target_kv // 2
        draft_weights = (room - small * per_slot - per_slot // 2) // _WEIGHT * _WEIGHT
    else:
        draft_weights = _FEW
        room = draft_weights + small * per_slot + per_slot // 2
    assert draft_weights > 0, f"{points.name}: {draft_weights} bytes of draft for {small} and {large} slots"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", points.name) or "measured"
    link = draft_weights / max(points.reload_s, _LEAST_LINK_S)
    device = Device(f"the server of {points.name}", 1.0, 1.0, _FEW + room, link)
    return SetUp(
        name,
        device,
        Model(f"{name}-target", 0.0, _FEW, 1, 1, target_kv),
        Model(f"{name}-draft", 0.0, draft_weights, 1, 1, draft_kv),
        max_gamma=points.gammas[-1],
        mem_fraction=1.0,
    )
