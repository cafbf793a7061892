"""The controller: rank 0 decides, every rank follows, outcomes are counted and journalled."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sglang_nightjar import controller as module
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.controller import Controller
from sglang_nightjar.controller_start import start_controller
from sglang_nightjar.coordination.messages import Directive, decode, encode, is_directive
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.observe.journal import Journal, read_journal
from sglang_nightjar.policy.base import Observation, State, StepKind
from sglang_nightjar.policy.baselines.fixed import Fixed
from sglang_nightjar.policy.baselines.random_switch import RandomSwitch
from sglang_nightjar.policy.planner import Planner


def make(rank: int, journal: Journal | None = None, clock: list[float] | None = None) -> Controller:
    planner = Planner(RandomSwitch(5, seed=3, longest=2)) if rank == 0 else None
    now = clock if clock is not None else [0.0]
    return Controller(planner, 5, 3, catchup_budget_s=0.1, journal=journal, clock=lambda: now[0])


def finish(own: Controller, seen: Observation, facts: StepFacts | None) -> None:
    """One step, its outcome processed before anything else happens."""
    own.launched(1, facts, began_s=own.clock(), after_idle=True)
    step, _ = own.flight.land(1, own.clock(), own.clock())
    own.finished(seen, step)


def decode_step(gamma: int, batch: int = 4) -> Observation:
    return Observation(StepKind.DECODE, batch, gamma, (batch, *[0] * gamma), 0.05, kv_tokens=100)


def test_every_rank_carries_out_the_same_directives() -> None:
    first, second = make(0), make(1)
    gammas = []
    for step in range(1, 1001):
        item = first.propose(State(now_s=step * 0.1, batch_size=4))
        for rank in (first, second):
            rank.apply(item)
            facts = StepFacts(rank.gamma, drafted=4 if rank.gamma else 0, tokens=4)
            finish(rank, decode_step(rank.gamma), facts)
        assert first.directive == second.directive and first.directive.step == step
        assert first.reserve() == first.gamma + 1
        gammas.append(first.gamma)
    assert set(gammas) == set(range(6))
    assert first.counters == second.counters
    assert first.counters.switches == sum((a > 0) != (b > 0) for a, b in zip([3, *gammas], gammas, strict=False))
    assert first.counters.steps_by_gamma == [gammas.count(gamma) for gamma in range(6)]


def test_a_lost_directive_is_noticed() -> None:
    first, second = make(0), make(1)
    first.apply(first.propose(State(now_s=0.0, batch_size=1)))
    with pytest.raises(AssertionError, match="directive 2 follows 0"):
        second.apply(first.propose(State(now_s=0.1, batch_size=1)))


def test_a_decision_lasts_until_it_is_used_or_the_batch_changes() -> None:
    own = make(0)
    assert own.wants_decision(4) and not own.wants_decision(0)
    own.apply(own.propose(State(now_s=0.0, batch_size=4)))
    assert not own.wants_decision(4), "a prefill came between"
    assert own.wants_decision(5)
    finish(own, decode_step(own.gamma), StepFacts(own.gamma))
    assert own.wants_decision(4)
    assert not make(1).wants_decision(4), "only rank 0 decides"


def test_with_overlap_a_decision_is_used_by_its_launch_not_by_an_outcome() -> None:
    """Each launch needs a decision of its own, although the outcome of the one before has not arrived."""
    own = make(0)
    for number in range(1, 20):
        assert own.wants_decision(4)
        own.apply(own.propose(State(now_s=float(number), batch_size=4)))
        own.launched(number, StepFacts(own.gamma), began_s=0.0, after_idle=False)
        if number > 1:
            step, _ = own.flight.land(number - 1, 0.0, 0.0)
            own.finished(decode_step(step.gamma), step)
            assert (step.directive, own.directive.step) == (number - 1, number)
    assert own.counters.steps_by_gamma != [18, 0, 0, 0, 0, 0] and sum(own.counters.steps_by_gamma) == 18


def test_slots_are_reserved_for_what_is_in_flight() -> None:
    own = make(0)
    own.launched(1, StepFacts(5), began_s=0.0, after_idle=True)
    assert own.reserve() == own.gamma + 1 + 6, "its drafts and its bonus token may all have been committed"
    own.flight.land(1, 0.0, 0.0)
    own.launched(2, None, began_s=0.0, after_idle=False)
    assert own.reserve() == own.gamma + 1, "a prefill leaves no length unknown"


def test_the_catchup_budget_follows_what_catching_up_costs() -> None:
    own = make(0)
    assert own.directive.catchup_tokens == 100, "0.1 s at the assumed 1 ms a token"
    for step in range(1, 40):
        own.apply(own.propose(State(now_s=float(step), batch_size=4)))
        finish(own, decode_step(own.gamma), StepFacts(own.gamma, catchup_tokens=100, catchup_seconds=0.01))
    assert 900 < own.directive.catchup_tokens <= 1000, "0.1 ms a token"


def test_journal_holds_states_directives_and_steps(tmp_path: Path) -> None:
    own = make(0, Journal(tmp_path / "journal"))
    other = make(1, Journal(tmp_path / "journal", rank=1))
    for step in range(3):
        item = own.propose(State(now_s=float(step), batch_size=2, kv_tokens=10))
        for rank in (own, other):
            rank.apply(item)
        finish(own, decode_step(own.gamma, batch=2), StepFacts(own.gamma))
    records = read_journal(tmp_path / "journal")
    assert [record["record"] for record in records] == ["state", "directive", "step"] * 3
    assert records[0]["kv_tokens"] == 10 and records[2]["kind"] == StepKind.DECODE
    assert [record["directive"] for record in records[2::3]] == [1, 2, 3]
    directives = [record for record in records if record["record"] == "directive"]
    assert directives == read_journal(tmp_path / "journal.rank1")


def test_journal_rotates(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", longest=500)
    for number in range(100):
        journal.write("step", {"number": number})
    assert (tmp_path / "j").stat().st_size <= 500
    kept = [record["number"] for name in ("j.3", "j.2", "j.1", "j") for record in read_journal(tmp_path / name)]
    assert kept == list(range(kept[0], 100)), "the last ones, in order"


def test_a_torn_journal_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"record":"step"}\n{"rec')
    with pytest.raises(ValueError, match="line 2"):
        read_journal(tmp_path / "j")


def test_directives_travel_as_msgpack() -> None:
    directive = Directive(epoch=1, step=9, gamma=4, catchup_tokens=64, verify_budget=None)
    item = encode(directive)
    assert is_directive(item) and decode(item) == directive
    assert not is_directive(b"something else") and not is_directive("text") and not is_directive(None)
    with pytest.raises(msgspec.ValidationError):
        decode(b"NJ1" + msgspec.msgpack.encode([1, 2, "three"]))


def test_report_is_json_ready() -> None:
    own = make(0)
    finish(own, decode_step(3), StepFacts(3, drafted=4, tokens=10, rejected=6))
    report = json.loads(json.dumps(own.report()))
    assert report["accept_length"] == 2.5 and report["rejected_drafts"] == 6 and report["steps_by_gamma"][3] == 1


def test_start_follows_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_current", None)
    own = start_controller(NightjarConfig(policy="static:2", journal=str(tmp_path / "j")), rank=0, max_gamma=2)
    assert module.current() is own and own.gamma == 2 and own.planner is not None
    follower = start_controller(NightjarConfig(policy="nightjar"), rank=1, max_gamma=5)
    assert follower.planner is None and follower.gamma == 3


def test_a_step_the_policy_refuses_is_counted_and_does_no_harm() -> None:
    own = make(0)
    own.apply(own.propose(State(now_s=0.0, batch_size=4)))
    finish(own, replace(decode_step(own.gamma), seconds=1e9), StepFacts(own.gamma))
    assert own.report()["refused_steps"] == 1
    finish(own, decode_step(own.gamma), StepFacts(own.gamma))
    assert own.report()["refused_steps"] == 1


def test_a_fixed_policy_is_asked_once_unless_it_is_recorded(tmp_path: Path) -> None:
    for journal in (None, Journal(tmp_path / "journal", 0)):
        own = make(0, journal)
        own.planner, own.constant = Planner(Fixed(3, 5)), 3
        assert own.wants_decision(4)
        own.apply(own.propose(State(now_s=0.0, batch_size=4)))
        finish(own, decode_step(3), StepFacts(3))
        assert own.wants_decision(4) == (journal is not None)


def test_switches_are_summed_up_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    own = make(0, clock=clock)
    with caplog.at_level("INFO", module.__name__):
        for _ in range(1000):
            clock[0] += 0.1
            own.apply(own.propose(State(now_s=clock[0], batch_size=4)))
            finish(own, decode_step(own.gamma), StepFacts(own.gamma))
    assert own.counters.switches > 50
    assert 1 <= len(caplog.messages) <= 100.0 / 30.0 + 1
