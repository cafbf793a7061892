"""Replaying a journal under other policies."""

import random
from pathlib import Path

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.observe.journal import Journal
from sglang_nightjar.simulate.__main__ import main
from sglang_nightjar.simulate.replay import Recording, replay


def true_seconds(gamma: int, batch: int) -> float:
    return 0.02 + 0.002 * batch * (gamma + 1) + 0.004 * gamma


def write_journal(path: Path, steps: int = 400) -> Path:
    """A server of acceptance 0.8 that switches at random, at batch sizes 1 and 40."""
    rng = random.Random(1)
    journal = Journal(path)
    for step in range(steps):
        batch, gamma = (1, 40)[step // 50 % 2], rng.randrange(4)
        committed = [0] * (gamma + 1)
        for _ in range(batch):
            accepted = 0
            while accepted < gamma and rng.random() < 0.8:
                accepted += 1
            committed[accepted] += 1
        journal.write("state", {"now_s": step * 0.1, "batch_size": batch, "kv_tokens": 100 * batch})
        journal.write(
            "step",
            {
                "kind": 0,
                "batch_size": batch,
                "gamma": gamma,
                "committed": committed,
                "seconds": true_seconds(gamma, batch),
                "kv_tokens": 100 * batch,
            },
        )
    return path


def test_costs_and_acceptance_are_read_from_the_journal(tmp_path: Path) -> None:
    recording = Recording(write_journal(tmp_path / "j"))
    for gamma in range(4):
        for batch in (1, 40):
            predicted = recording.model.step_time.predict(gamma, batch, 100 * batch)
            assert predicted == pytest.approx(true_seconds(gamma, batch), rel=0.05)
    assert recording.model.acceptance.by_position[0] == pytest.approx(0.8, abs=0.03)


def test_a_step_belongs_to_its_own_decision(tmp_path: Path) -> None:
    """With overlap scheduling the next decision is written before a step's outcome."""
    journal = Journal(tmp_path / "j")
    for number in range(1, 101):
        journal.write("state", {"now_s": float(number), "batch_size": number})
        journal.write("directive", {"step": number})
        if number > 1:
            journal.write(
                "step",
                {"kind": 0, "batch_size": number - 1, "gamma": 0, "committed": [number - 1], "seconds": 0.1}
                | {"directive": number - 1},
            )
    recording = Recording(tmp_path / "j")
    assert len(recording.steps) == 99
    assert [state.batch_size for state in recording.states] == [step.batch_size for step in recording.steps]


def test_a_policy_takes_the_place_of_the_recorded_one(tmp_path: Path) -> None:
    recorded, off, static, nightjar = replay(write_journal(tmp_path / "j"), ["off", "static:3", "nightjar"])
    assert recorded.switches > 50 and sum(recorded.gammas) == 400
    assert off.gammas == [400, 0, 0, 0] and off.switches == 0
    assert off.tokens == static.tokens == recorded.tokens, "all do the recorded work"
    assert static.gammas == [0, 0, 0, 400]
    assert nightjar.tokens_per_s > max(off.tokens_per_s, static.tokens_per_s), "it may change with the batch"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_journal(tmp_path / "j")
    assert main(["--replay", str(path), "--policies", "off,dsd"]) == 0
    printed = capsys.readouterr().out
    assert "(recorded)" in printed and "dsd" in printed


@pytest.mark.parametrize("content", ["", "not json\n", '{"record": "state"}\n'])
def test_no_journal(content: str, tmp_path: Path) -> None:
    (tmp_path / "j").write_text(content)
    with pytest.raises(UserError):
        Recording(tmp_path / "j")
