"""A set-up file made of a server's journal."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.observe.journal import Journal
from sglang_nightjar.simulate.__main__ import main
from sglang_nightjar.simulate.from_journal import measure
from sglang_nightjar.simulate.measured import read_measured

KV_TOKEN_S = 2e-6


def true_seconds(gamma: int, batch: int, kv_tokens: int) -> float:
    return 0.03 + 0.001 * batch * (gamma + 1) + 0.004 * gamma + KV_TOKEN_S * kv_tokens


def write(path: Path, batches: tuple[int, ...], gammas: tuple[int, ...], steps: int = 1200, **extra: Any) -> Path:
    """A server at each of `batches` in turn that changes gamma every step; every 50th step is a prefill."""
    draw, journal = random.Random(4), Journal(path)
    for step in range(steps):
        batch, gamma = batches[step * len(batches) // steps], draw.choice(gammas)
        kv = batch * draw.randint(100, 1500)
        seen = {"kind": 0, "batch_size": batch, "gamma": gamma, "committed": [batch], "kv_tokens": kv}
        seen["seconds"] = true_seconds(gamma, batch, kv) * draw.uniform(0.97, 1.03)
        if step % 50 == 0:
            seen = {"kind": 1, "batch_size": 0, "gamma": 0, "committed": [], "prefill_tokens": 400, "seconds": 0.8}
        journal.write("step", {**seen, "total_slots": 6144, **extra})
    journal.close()
    return path


def test_the_points_are_those_of_the_server(tmp_path: Path) -> None:
    path = write(tmp_path / "j", (1, 2, 4, 8, 16, 24), (0, 1, 3))
    points = measure([path], "machine")
    assert points.batches == (1, 2, 4, 8, 16, 24) and points.gammas == (0, 1, 2, 3)
    assert points.kv_token_s == pytest.approx(KV_TOKEN_S, rel=0.15)
    for gamma, row in zip(points.gammas, points.seconds, strict=True):  # gamma 2 was never played
        for batch, seconds in zip(points.batches, row, strict=True):
            known = true_seconds(gamma, batch, 800 * batch)
            assert seconds + points.kv_token_s * 800 * batch == pytest.approx(known, rel=0.05), (gamma, batch)
    assert points.prefill_token_s == pytest.approx(0.002)
    assert points.draft_token_s == 0.0
    assert (points.slots_resident, points.slots_evicted) == (6144, 6144)


def test_several_journals_make_one_set_up(tmp_path: Path) -> None:
    plain = write(tmp_path / "a", (1, 8), (0,))
    drafted = write(tmp_path / "b", (1, 8), (3,), catchup_tokens=100, catchup_seconds=0.01)
    away = write(tmp_path / "c", (8,), (0,), steps=100, residency=2, total_slots=9000)
    points = measure([plain, drafted, away], "machine")
    assert points.seconds[3][points.batches.index(8)] == pytest.approx(true_seconds(3, 8, 0) - 0.01, rel=0.1)
    assert points.draft_token_s == pytest.approx(1e-4)
    assert (points.slots_resident, points.slots_evicted) == (6144, 9000)


def test_a_prefill_has_a_fixed_part_and_the_draft_s_reading_is_not_in_it(tmp_path: Path) -> None:
    path = write(tmp_path / "j", (1, 8), (0, 2))
    journal, draw = Journal(path), random.Random(1)
    for _ in range(400):
        tokens = draw.randint(10, 300)
        seen = {"kind": 1, "batch_size": 0, "committed": [], "prefill_tokens": tokens, "total_slots": 6144}
        journal.write("step", {**seen, "gamma": 0, "seconds": 0.09 + 1e-3 * tokens * draw.uniform(0.95, 1.05)})
        journal.write("step", {**seen, "gamma": 2, "seconds": 0.3 + 2e-3 * tokens})
    journal.close()
    points = measure([path], "machine")
    # `write` has some prefills of another kind: 400 tokens in 0.8 s. They are few.
    assert points.prefill_step_s == pytest.approx(0.09, rel=0.1)
    assert points.prefill_token_s == pytest.approx(1e-3, rel=0.1)


def test_the_file_is_one_that_scenarios_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = write(tmp_path / "j", (1, 12), (0, 2)), tmp_path / "machine.json"
    assert main(["--measure", str(path), "--json", str(made)]) == 0
    assert "gamma" in capsys.readouterr().out
    cost = read_measured(made)
    assert cost.max_gamma == 2 and cost.points.name == "machine"
    assert cost.step_s(12, 2, 9600.0) == pytest.approx(true_seconds(2, 12, 9600), rel=0.05)
    scenario = tmp_path / "scenario.json"
    load = {"kind": "closed", "concurrency": 4}
    scenario.write_text(json.dumps({"name": "s", "set_up": "machine.json", "arrivals": load, "duration_s": 60}))
    assert main(["--scenario", str(scenario), "--policies", "off", "--seeds", "1"]) == 0


def test_journals_that_say_too_little_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    poor = {"a": ((8,), (0, 1), 1200), "b": ((1, 8), (1, 2), 1200), "c": ((1, 8), (0,), 90)}
    for name, (batches, gammas, steps) in poor.items():
        with pytest.raises(UserError, match="under several concurrencies"):
            measure([write(tmp_path / name, batches, gammas, steps)], "machine")
    assert main(["--measure", str(tmp_path / "a")]) == 1
    assert "--json" in capsys.readouterr().err
    with pytest.raises(UserError, match="--nightjar-journal"):
        measure([tmp_path / "none"], "machine")
