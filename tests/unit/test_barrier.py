"""Finishing the step under way, in SGLang's own overlap loop over a scheduler made of plain objects."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.scheduler import Scheduler

from sglang_nightjar import controller as module
from sglang_nightjar.controller import Controller
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches import lockstep, outcome
from sglang_nightjar.patches.barrier import PROCESSED, finish_step

STEPS = 12


class Batch:
    """What the loop and the hooks read of a batch."""

    def __init__(self, number: int, prefills: bool) -> None:
        self.forward_iter, self.prefills, self.enable_overlap = number, prefills, True
        self.reqs = [SimpleNamespace(finished=lambda: False, is_retracted=False, inflight_middle_chunks=1)]
        self.forward_mode = SimpleNamespace(is_extend=lambda: prefills, is_decode=lambda: not prefills)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: False)
        self.grammar_needs_sync = lambda: False
        self.extend_num_tokens = 0

    def copy(self) -> "Batch":
        return self


class Loop:
    """A scheduler as far as `Scheduler.event_loop_overlap` goes: `STEPS` batches, then an idle iteration, then the end.

    `happened` has each launch and each outcome, by number.
    """

    def __init__(self, own: Controller, before: Callable[["Loop"], None], *, prefills: bool) -> None:
        self._own, self._before, self._prefills = own, before, prefills
        self.happened: list[tuple[str, int]] = []
        self.iteration = 0
        self.gracefully_exit = self._engine_paused = False
        self.running_batch: Any = SimpleNamespace(reqs=[], batch_is_full=False)
        # What an outcome says of the server.
        self.waiting_queue: list[Any] = []
        self.max_total_num_tokens = 100
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 50)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 25)
        self.last_batch: Any = None
        self.enable_unified_memory, self.require_mlp_sync, self.is_generation = False, False, True
        self.enable_overlap, self.chunked_req, self.disaggregation_mode = True, None, None
        self.invariant_checker = self.metrics_reporter = self.kv_events_publisher = MagicMock()
        self.decode_offload_manager = self._pause_started_at = None

    def ingest_requests(self) -> None:
        self.iteration += 1
        self._before(self)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        assert last_batch is self.last_batch
        number = self.iteration
        batch = Batch(number, self._prefills) if number <= STEPS else None
        return SimpleNamespace(running_batch=running_batch, batch_to_run=batch)

    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> bool:
        return bool(Scheduler.is_disable_overlap_for_batch(self, batch, last_batch))

    def run_batch(self, batch: Batch) -> Any:
        self.happened.append(("launch", batch.forward_iter))
        facts = None if batch.prefills else StepFacts(0)
        self._own.launched(batch.forward_iter, facts, began_s=0.0, after_idle=False)
        return MagicMock(**{"accept_lens.tolist.return_value": [1]})

    def process_batch_result(self, batch: Any, result: Any) -> None:
        outcome.report_outcome(self._process, self, batch, result)

    def _process(self, scheduler: Any, batch: Batch, result: Any) -> None:
        self.happened.append(("outcome", batch.forward_iter))

    def on_idle(self) -> None:
        self.gracefully_exit = True

    def _apply_war_barrier(self) -> None: ...

    def _record_scheduler_state_for_paused_engine(self) -> None: ...

    def launch_batch_sample_if_needed(self, batch_result: Any, cur_batch: Any) -> None: ...


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    made = Controller(None, 5, 3, catchup_budget_s=0.1, clock=lambda: 1.0)
    monkeypatch.setattr(module, "_current", made)
    monkeypatch.setattr(outcome, "_observation", lambda *_: MagicMock(prefill_tokens=0))
    yield made


def run(own: Controller, monkeypatch: pytest.MonkeyPatch, before: Callable[[Loop], None], prefills: bool) -> Loop:
    loop = Loop(own, before, prefills=prefills)
    monkeypatch.setattr(lockstep, "_scheduler", [loop])
    Scheduler.event_loop_overlap(loop)
    return loop


def numbers(loop: Loop, kind: str) -> list[int]:
    return [number for each, number in loop.happened if each == kind]


@pytest.mark.parametrize("prefills", [False, True])
@pytest.mark.parametrize("together", [False, True])  # whether SGLang overlaps two prefills
@pytest.mark.parametrize("wanted", [{1}, {2}, {5}, {5, 6, 7}, {STEPS}, {STEPS + 1}, {STEPS + 2}])
def test_each_outcome_is_processed_once_and_in_order(
    own: Controller, monkeypatch: pytest.MonkeyPatch, wanted: set[int], prefills: bool, together: bool
) -> None:
    in_order: list[int] = []

    def before(loop: Loop) -> None:
        if loop.iteration in wanted:
            finish_step()
            finish_step()  # a turn, and then what it begins with
            assert numbers(loop, "outcome") == numbers(loop, "launch"), "no step is under way"
            in_order.append(loop.iteration)

    monkeypatch.setenv("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", str(int(not together)))
    loop = run(own, monkeypatch, before, prefills)
    assert numbers(loop, "launch") == numbers(loop, "outcome") == list(range(1, STEPS + 1))
    assert in_order == sorted(wanted) and own.flight.under_way == 0
    late = [
        loop.happened.index(("launch", number + 1)) < loop.happened.index(("outcome", number))
        for number in range(1, STEPS)
    ]
    lost = {number + 1 for number in range(1, STEPS) if not late[number - 1]}
    if prefills and not together:
        assert len(lost) == STEPS - 1
    else:
        assert lost == wanted & set(range(2, STEPS + 1)), "overlap is lost where a step was finished, and nowhere else"


def test_the_engine_may_be_paused_in_the_same_iteration(own: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that retracts what runs takes the outcome under way out of the queue by itself."""

    def before(loop: Loop) -> None:
        if loop.iteration == 5:
            finish_step()
            loop._engine_paused = True
            Scheduler.pause_generation(loop, SimpleNamespace(mode="retract"))
            assert not loop.result_queue and loop.last_batch is None  # type: ignore[attr-defined]
        elif loop._engine_paused:
            finish_step()
            loop._engine_paused = loop.iteration < 8

    loop = run(own, monkeypatch, before, False)
    assert numbers(loop, "launch") == numbers(loop, "outcome") == [1, 2, 3, 4, *range(8, STEPS + 1)]


def test_a_pause_that_leaves_all_where_it_is(own: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(loop: Loop) -> None:
        if loop.iteration == 5:
            Scheduler.pause_generation(loop, SimpleNamespace(mode="in_place"))
        if loop.iteration in (6, 7):
            finish_step()
            assert loop.result_queue[0][0] is PROCESSED  # type: ignore[attr-defined]
        loop._engine_paused = 5 <= loop.iteration < 8

    loop = run(own, monkeypatch, before, False)
    assert numbers(loop, "launch") == numbers(loop, "outcome") == [1, 2, 3, 4, *range(8, STEPS + 1)]


def test_a_step_that_nobody_awaits_is_noticed(own: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(loop: Loop) -> None:
        if loop.iteration == 5:
            loop.result_queue[0] = PROCESSED, None  # type: ignore[attr-defined]
            finish_step()

    with pytest.raises(AssertionError, match="1 steps are still under way"):
        run(own, monkeypatch, before, False)
