"""Sizes: every set-up's KV capacity is the real one, with the draft and without it."""

import dataclasses

import pytest

from sglang_nightjar.emulate.scale import SCALE, budget_bytes, scaled
from sglang_nightjar.errors import UserError
from sglang_nightjar.memory.arena import Regions
from sglang_nightjar.memory.arena_posix import PAGE, posix_arena
from sglang_nightjar.simulate.roofline import SetUp
from sglang_nightjar.simulate.setups import SET_UPS


@pytest.fixture(params=SET_UPS.values(), ids=SET_UPS)
def set_up(request: pytest.FixtureRequest) -> SetUp:
    chosen: SetUp = request.param
    return chosen


def test_bytes_are_the_real_ones_divided(set_up: SetUp) -> None:
    for model in (set_up.target, set_up.draft):
        size = scaled(model)
        assert size.kv_bytes * SCALE == model.kv_bytes
        assert size.weight_bytes * SCALE == pytest.approx(model.weight_bytes, abs=4 * SCALE)


def test_slots_are_the_set_up_s(set_up: SetUp) -> None:
    """As the ledger and the pools count them: buffers of whole pages, one of them slot 0's."""
    target, draft = scaled(set_up.target), scaled(set_up.draft)
    without = budget_bytes(set_up) - target.weight_bytes
    row_bytes = target.kv_bytes // 2
    rows_max = set_up.slots(False) + 2 * PAGE
    regions = Regions(posix_arena(Regions.reserved_bytes(2, rows_max, row_bytes, PAGE)), 2, rows_max, row_bytes)
    large = regions.rows_for(without) - 1
    page_slots = -(-PAGE // row_bytes) + 1
    assert set_up.slots(False) - page_slots <= large <= set_up.slots(False)

    small = set_up.slots(True)
    left = without - draft.weight_bytes - small * (target.kv_bytes + draft.kv_bytes)
    assert -8 <= left <= target.kv_bytes + draft.kv_bytes + 8, "of the budget, less than a slot is left over"


def test_a_model_that_cannot_be_divided(set_up: SetUp) -> None:
    for kv_bytes in (set_up.target.kv_bytes + 8, 2 * 4 * SCALE * 2):
        odd = dataclasses.replace(set_up.target, kv_bytes=kv_bytes)
        with pytest.raises(UserError, match="emulate another model"):
            scaled(odd)
