"""Step times and pool sizes, against sums done by hand."""

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.roofline import Device, Model, SetUp, StepCost
from sglang_nightjar.simulate.setups import SET_UPS, find_set_up

# 1 GFLOP/s and 1 GB/s effective, no overheads, so that every term is a round number.
DEVICE = Device(
    "toy",
    peak_flops=2e9,
    bandwidth=2e9,
    memory_bytes=10_000.0,
    link_bytes_s=100.0,
    flops_efficiency=0.5,
    bandwidth_efficiency=0.5,
    step_overhead_s=1.0,
    speculation_overhead_s=2.0,
    launch_s=0.0,
    layer_s=0.0,
)
TARGET = Model("target", parameters=1e6, weight_bytes=4000.0, layers=2, hidden=8, kv_bytes=1e3)
DRAFT = Model("draft", parameters=1e5, weight_bytes=1000.0, layers=1, hidden=4, kv_bytes=1e2)
SET_UP = SetUp("toy", DEVICE, TARGET, DRAFT, mem_fraction=0.9)


def test_a_plain_step_of_few_requests_reads_the_weights() -> None:
    # 2e6 bytes of weights at 1e9/s; 5 tokens of KV at 1e3 bytes; the fixed second. (Compute: 1 * 2e6 FLOP, the same.)
    assert StepCost(SET_UP).decode_s(1, 5) == pytest.approx(2e-3 + 5e-6 + 1.0)


def test_many_tokens_are_bound_by_compute() -> None:
    assert StepCost(SET_UP).verify_s(40, 0) == pytest.approx(40 * 2e-3)


def test_drafting_is_gamma_forwards_and_verification_one_of_all_tokens() -> None:
    cost = StepCost(SET_UP)
    draft = 3 * (max(4 * 2e5, 2e5) / 1e9 + 10 * 1e2 / 1e9)
    assert cost.draft_s(4, 3, 10) == pytest.approx(draft)
    verify = 4 * 4 * 2e6 / 1e9 + 10 * 1e3 / 1e9
    assert cost.step_s(4, 3, 10) == pytest.approx(draft + verify + 1.0 + 2.0)


def test_only_those_who_draft_are_drafted_for_and_verified() -> None:
    cost = StepCost(SET_UP)
    draft = 2 * (2e5 * 1 / 1e9 + 100 * 1e2 / 1e9)  # one of four drafts, with a quarter of the context
    verify = (4 + 1 * 2) * 2e6 / 1e9 + 400 * 1e3 / 1e9
    assert cost.step_s(4, 2, 400, drafters=1) == pytest.approx(draft + verify + 3.0)
    assert cost.step_s(4, 2, 400, drafters=0) == cost.decode_s(4, 400)


def test_prefill_and_catch_up() -> None:
    cost = StepCost(SET_UP)
    assert cost.prefill_s(100, 0, draft=False) == pytest.approx(0.2 + 1.0)
    assert cost.prefill_s(100, 0, draft=True) == pytest.approx(0.2 + 0.02 + 1.0)
    assert cost.catchup_s(100, 50) == pytest.approx(0.02 + 50 * 1e2 / 1e9)
    assert cost.catchup_s(0, 50) == 0.0


def test_pool_with_and_without_the_draft() -> None:
    assert SET_UP.slots(resident=True) == (9000 - 4000 - 1000) // 1100
    assert SET_UP.slots(resident=False) == (9000 - 4000) // 1000


def test_relocation_and_reload() -> None:
    cost = StepCost(SET_UP)
    assert cost.relocate_s(3) == pytest.approx(3 * 2 * 1100 / 1e9)
    assert cost.reload_s() == pytest.approx(10.0)


def test_tensor_parallelism_halves_the_work_and_adds_all_reduces() -> None:
    device = Device("toy2", 2e9, 2e9, 1e4, 100.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, peer_bytes_s=1e6, allreduce_s=0.25)
    cost = StepCost(SetUp("toy2", device, TARGET, DRAFT, tp=2))
    # 2 layers: 4 all-reduces of 10 tokens * 8 values * 2 bytes, of which a ring of two carries all once.
    expected = 10 * 2e6 / 2e9 + 4 * 0.25 + 4 * 10 * 16 / 1e6
    assert cost.verify_s(10, 0) == pytest.approx(expected)
    assert cost.reload_s() == pytest.approx(5.0)


@pytest.mark.parametrize("name", SET_UPS)
def test_named_set_ups_are_plausible(name: str) -> None:
    set_up = find_set_up(name)
    cost = StepCost(set_up)
    small, large = set_up.slots(True), set_up.slots(False)
    assert 1_000 < small < large
    # One request: memory-bound, 5 to 60 ms; a draft forward is far below a target's.
    assert 5e-3 < cost.decode_s(1, 500) < 60e-3
    assert cost.draft_s(1, 1, 500) < 0.35 * cost.verify_s(1, 500)
    # Speculation pays for one request at acceptance 0.7, and not for 256.
    tokens = 1 + 0.7 + 0.7**2 + 0.7**3
    assert cost.step_s(1, 3, 500) / tokens < cost.decode_s(1, 500)
    if name != "h200-70b":  # its compute has room for more
        kv = min(128_000, small)
        assert cost.step_s(256, 3, kv) / tokens > cost.decode_s(256, kv)


def test_an_unknown_set_up_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="set_up: no set-up is called 'h100'.*h200-70b"):
        find_set_up("h100")
