"""What a request's `meta_info` says about speculation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_nightjar import controller as module
from sglang_nightjar.controller import Controller
from sglang_nightjar.observe import per_request
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches import outcome
from sglang_nightjar.policy.base import Observation, StepKind


def test_a_story_counts_its_own_steps_and_what_the_server_did_meanwhile() -> None:
    first, second = SimpleNamespace(), SimpleNamespace()
    per_request.begin([first], switches=3, draft_forwards=100, catchup_tokens=7)
    per_request.add_step([first], [True], [4])
    per_request.begin([first, second], switches=4, draft_forwards=110, catchup_tokens=7)  # `first`: a later chunk
    per_request.add_step([first, second], [True, False], [1, 1])
    assert per_request.tell(first, 2, 5, 130, 27) == {
        "gamma": 2,
        "accept_length": 2.5,
        "speculative_steps": 2,
        "switches": 2,
        "draft_forwards": 30,
        "catchup_tokens": 20,
    }
    told = per_request.tell(second, 2, 5, 130, 27)
    assert (told["accept_length"], told["speculative_steps"], told["draft_forwards"]) == (None, 0, 20)


def test_a_request_that_never_ran() -> None:
    told = per_request.tell(SimpleNamespace(), 0, 5, 130, 27)
    assert (told["switches"], told["draft_forwards"], told["accept_length"]) == (0, 0, None)


def test_a_step_counts_when_its_outcome_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before who ends with it is answered; and one that was launched before the end was known does not count."""
    ended: set[int] = set()
    reqs = [
        SimpleNamespace(finished=lambda i=i: i in ended, is_retracted=False, inflight_middle_chunks=0) for i in range(3)
    ]
    own = Controller(None, 5, 3, catchup_budget_s=0.1, clock=lambda: 0.0)
    monkeypatch.setattr(module, "_current", own)
    monkeypatch.setattr(outcome, "_observation", lambda *_: Observation(StepKind.DECODE, 3, 2, (0, 0, 3), 0.1))
    own.begin_stories(reqs)
    for number, drafting in enumerate([(True, False, True), (True, True, True)]):
        facts = StepFacts(2, drafted=sum(drafting), drafting=drafting)
        own.launched(number, facts, began_s=0.0, after_idle=False)
    told: list[dict[str, Any]] = []

    def process(*_: Any) -> None:
        ended.add(0)
        told.append(own.story_of(reqs[0]))

    decode = SimpleNamespace(is_extend=lambda: False)
    for number, lens in enumerate([[3, 1, 1], [3, 2, 3]]):
        result = SimpleNamespace(accept_lens=torch.tensor(lens), copy_done=SimpleNamespace(synchronize=lambda: None))
        batch = SimpleNamespace(reqs=reqs, forward_iter=number, forward_mode=decode, enable_overlap=True)
        outcome.report_outcome(process, None, batch, result)
    told += [own.story_of(req) for req in reqs]
    counts = [(story["speculative_steps"], story["accept_length"]) for story in told]
    assert counts == [(1, 3.0), (1, 3.0), (1, 3.0), (1, 2.0), (2, 2.0)]
