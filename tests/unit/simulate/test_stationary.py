"""The bandit's world: the oracle's plan, regret, determinism."""

import numpy as np
import pytest

from sglang_nightjar.policy.baselines.fixed import Fixed
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.setups import find_set_up
from sglang_nightjar.simulate.stationary import Tables, World, log_spaced, run
from sglang_nightjar.simulate.suite_regret import interval, recovered_after, slope

COST = StepCost(find_set_up("4090-r1-qwen-7b"))


def world(batches: tuple[int, ...], alpha: float = 0.7, stay: float = 0.98) -> World:
    return World("test", COST, np.array([alpha]), batches, (1.0,) * len(batches), stay)


def test_with_one_batch_size_the_plan_is_the_best_arm() -> None:
    for batch in (1, 16, 250):
        tables = Tables(world((batch,)))
        assert tables.plan((1.0,), 0.98)[0, 0] == tables.loss[0].argmin()


def test_a_turn_to_speculation_must_pay_for_its_catch_up() -> None:
    """Where the batch size changes in every decision, speculating for one decision is not worth the switch."""
    tables = Tables(world((120, 250)))
    tables.catchup[:] *= 1000.0
    assert (tables.plan((1.0, 1.0), 0.0)[:, 1:] == 0).all()
    tables.catchup[:] = 0.0
    assert tables.plan((1.0, 1.0), 0.0)[0, 5] == tables.loss[0].argmin()


def test_the_best_arm_has_no_regret_and_others_have_theirs() -> None:
    here = world((16,))
    loss = Tables(here).loss[0]
    best = int(loss.argmin())
    assert run(Fixed(best, 5), [here], [2000], 0).regret([2000])[0] == pytest.approx(0.0, abs=1e-9)
    expected = 2000 * (loss[0] - loss[best])
    assert run(Fixed(0, 5), [here], [2000], 0).regret([1000, 2000]) == pytest.approx([expected / 2, expected])


def test_no_fixed_arm_beats_the_oracle_where_the_batch_size_changes() -> None:
    here = world((8, 64, 200))
    for gamma in range(6):
        assert run(Fixed(gamma, 5), [here], [5000], 1).regret([5000])[0] > -1e-9


def test_the_charge_may_be_what_clients_feel() -> None:
    paper, tokens = (World("w", COST, np.array([0.7]), (64,), charge=charge) for charge in ("paper", "tokens"))  # type: ignore[arg-type]
    assert Tables(paper).share[0].tolist() == [1, 1, 2, 3, 4, 5]
    assert Tables(tokens).share[0, 1] == pytest.approx(64 * 1.7)


def test_a_run_repeats_under_its_seed_and_worlds_follow_each_other() -> None:
    worlds = [world((8, 64)), world((200,), alpha=0.3)]
    first, again = (run(Fixed(2, 5), worlds, [300, 200], 7) for _ in range(2))
    assert len(first.loss) == 500
    assert np.array_equal(first.loss, again.loss) and np.array_equal(first.best, again.best)


def test_figures() -> None:
    assert log_spaced(10**6)[0] == 1000 and log_spaced(10**6)[-1] == 10**6
    assert slope([10, 100, 1000], [1.0, 10**0.5, 10.0]) == pytest.approx(0.5)
    assert interval([1.0, 3.0]) == pytest.approx((2.0, 1.96))
    assert recovered_after([2.0] * 50 + [1.0] * 400, [1.0] * 450) == pytest.approx(45)
    assert np.isnan(recovered_after([2.0] * 400, [1.0] * 400))
