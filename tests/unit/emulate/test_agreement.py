"""How often the draft agrees: measured over many contexts against what the schedule says."""

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_nightjar.emulate.agreement import Agreement, read_acceptance
from sglang_nightjar.emulate.context_hash import another, scramble
from sglang_nightjar.emulate.vocabulary import FIRST, ORDINARY
from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.acceptance import AcceptanceSpec, Domain, DriftPoint

N = 40_000
HASHES = scramble(np.arange(N, dtype=np.uint64), 7)
RANDOM = (scramble(HASHES, 8) >> np.uint64(40)).astype(np.uint32)  # a request of its own for each context
RIGHT = FIRST + (HASHES % np.uint64(ORDINARY)).astype(np.int64)


def tagged(domain: int) -> np.ndarray:
    return RANDOM | np.uint32((domain + 1) << 24)


def agreed(agreement: Agreement, marks: np.ndarray, now_s: float = 0.0) -> float:
    return float((agreement.answers(HASHES, marks, RIGHT, now_s)[0] == RIGHT).mean())


def close(share: float, alpha: float) -> bool:
    return abs(share - alpha) < 5 * np.sqrt(0.25 / N) + 0.01  # the noise, and that of the 4,096 alphas drawn


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_the_mean_is_the_domain_s(alpha: float) -> None:
    assert close(agreed(Agreement(AcceptanceSpec((Domain(alpha),))), RANDOM), alpha)


def test_a_request_keeps_its_alpha() -> None:
    """Contexts of one request agree with one probability, which differs from request to request."""
    agreement = Agreement(AcceptanceSpec((Domain(0.5, concentration=2.0),)))
    for request in (3, 99, 4000):
        marks = np.full(N, request, np.uint32)
        alpha = agreement.alpha(marks[:1], 0.0)[0]
        assert abs(agreed(agreement, marks) - alpha) < 5 * np.sqrt(0.25 / N)
    assert np.std(agreement.alpha(RANDOM, 0.0)) > 0.2


def test_domains_by_tag_and_by_weight() -> None:
    spec = AcceptanceSpec((Domain(0.9, weight=3.0), Domain(0.2)))
    agreement = Agreement(spec)
    assert close(agreed(agreement, tagged(0)), 0.9) and close(agreed(agreement, tagged(1)), 0.2)
    assert close(agreed(agreement, RANDOM), 0.75 * 0.9 + 0.25 * 0.2)
    assert close(agreed(agreement, tagged(5)), agreed(agreement, RANDOM)), "a domain that is not there counts as none"


def test_time() -> None:
    spec = AcceptanceSpec((Domain(0.8),), drift=(DriftPoint(10.0, 0.25), DriftPoint(20.0, 1.0)))
    agreement = Agreement(spec)
    assert [close(agreed(agreement, RANDOM, now), alpha) for now, alpha in ((9.9, 0.8), (10.1, 0.2), (21.0, 0.8))] == [
        True
    ] * 3


def test_a_context_that_agreed_agrees_at_any_higher_alpha() -> None:
    """One number per context, whatever the schedule: all policies meet the same easy and hard tokens."""
    low, high = (Agreement(AcceptanceSpec((Domain(alpha, concentration=1e9),))) for alpha in (0.4, 0.6))
    answers = [agreement.answers(HASHES, RANDOM, RIGHT, 0.0)[0] == RIGHT for agreement in (low, high)]
    assert (answers[1] | ~answers[0]).all() and answers[1].sum() > answers[0].sum()


def test_wrong_answers_are_ordinary_tokens_and_never_right() -> None:
    wrong = another(RIGHT, HASHES)
    assert (wrong != RIGHT).all() and wrong.min() >= FIRST and wrong.max() < FIRST + ORDINARY
    assert len(np.unique(wrong)) == ORDINARY


def test_a_fully_calibrated_draft_states_how_often_it_agrees() -> None:
    agreement = Agreement(AcceptanceSpec((Domain(0.6),), calibration=1.0))
    answers, stated = agreement.answers(HASHES, RANDOM, RIGHT, 0.0)
    for low in (0.2, 0.5, 0.8):
        some = (stated >= low) & (stated < low + 0.1)
        assert abs((answers == RIGHT)[some].mean() - stated[some].mean()) < 0.05


def test_reading(tmp_path: Path) -> None:
    assert read_acceptance("") == AcceptanceSpec()
    assert read_acceptance("0.45") == AcceptanceSpec((Domain(0.45),))
    file = tmp_path / "drift.json"
    file.write_text(json.dumps({"domains": [{"alpha": 0.9}, {"alpha": 0.1}], "drift": [{"at_s": 5, "scale": 0.5}]}))
    assert read_acceptance(str(file)).drift == (DriftPoint(5.0, 0.5),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1.5", "choose a value from 0 to 1"),
        ("nowhere.json", "cannot read the acceptance nowhere.json"),
        ({"position_decay": 0.9}, "position_decay is not emulated"),
        ({"domains": []}, "domains has 0 entries"),
        ({"drift": [{"at_s": 5, "scale": 1}, {"at_s": 4, "scale": 1}]}, "in the order of at_s"),
        ({"alpha": 1}, "unknown field"),
    ],
)
def test_mistakes(content: str | dict[str, object], message: str, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else str(tmp_path / "spec.json")
    if not isinstance(content, str):
        Path(text).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        read_acceptance(text)
