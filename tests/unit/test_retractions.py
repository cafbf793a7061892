"""Requests that arrive and requests that lose their slots are counted, and told in the journal of every step."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput

from sglang_nightjar import controller as module
from sglang_nightjar.controller import Controller
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.observe.journal import Journal, read_journal
from sglang_nightjar.patches import lockstep, retractions
from sglang_nightjar.policy.base import Observation, StepKind
from sglang_nightjar.policy.baselines.fixed import Fixed
from sglang_nightjar.policy.planner import Planner


def message(kind: Any, **known: Any) -> Any:
    """A message of SGLang's with only the `known` fields filled in."""
    fields = msgspec.structs.fields(kind)
    return kind(**{field.name: known.get(field.name) for field in fields if field.required or field.name in known})


def test_arrivals_and_retractions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = Controller(
        Planner(Fixed(3, 5)), 5, 3, catchup_budget_s=0.1, journal=Journal(tmp_path / "journal"), clock=lambda: 7.0
    )
    monkeypatch.setattr(module, "_current", own)
    monkeypatch.setattr(lockstep, "decide", lambda *_: None)
    monkeypatch.setattr(lockstep, "_scheduler", [None])
    one = message(TokenizedGenerateReqInput)
    two = message(BatchTokenizedGenerateReqInput, batch=[message(TokenizedGenerateReqInput) for _ in range(2)])
    lockstep.carry_directive(lambda receiver, reqs, local: reqs, None, ["other", one, two])
    answer = (["first", "second"], 0.7, [])
    assert retractions.count_retracted(lambda batch: answer, None) is answer
    own.launched(1, StepFacts(3), began_s=6.0, after_idle=True)
    step, _ = own.flight.land(1, 6.0, 7.0)
    own.finished(Observation(StepKind.DECODE, 1, 3, (1,), 0.1), step)
    [record] = [record for record in read_journal(tmp_path / "journal") if record["record"] == "step"]
    assert (record["now_s"], record["arrived"], record["retracted"]) == (7.0, 3, 2)
    assert (own.report()["arrived"], own.report()["retracted"]) == (3, 2)


def test_without_a_controller_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current", None)
    assert retractions.count_retracted(lambda batch: ([], 0.5, []), None) == ([], 0.5, [])
