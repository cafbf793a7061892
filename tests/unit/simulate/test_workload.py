"""Arrivals, lengths and traces."""

from pathlib import Path

import numpy as np
import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.traces import read_trace
from sglang_nightjar.simulate.workload import (
    Bursts,
    Closed,
    Empirical,
    Fixed,
    Lognormal,
    Named,
    OnOff,
    Poisson,
    Ramp,
    Trace,
    draw_lengths,
    draw_work,
)

LENGTHS = Fixed(10, 5)


def test_lognormal_has_its_mean_and_bounds() -> None:
    prompt, output = draw_lengths(Lognormal(100.0, 40.0, 0.5, 0.5), 50_000, np.random.default_rng(0))
    assert prompt.mean() == pytest.approx(100, rel=0.02)
    assert output.mean() == pytest.approx(40, rel=0.02)
    prompt, _ = draw_lengths(Lognormal(100.0, 40.0, 2.0, 2.0, most=64), 1000, np.random.default_rng(0))
    assert prompt.min() >= 1 and prompt.max() == 64


def test_empirical_draws_pairs() -> None:
    prompt, output = draw_lengths(Empirical(((3, 4), (30, 40))), 100, np.random.default_rng(0))
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(3, 4), (30, 40)}
    with pytest.raises(UserError, match="lengths.pairs is empty"):
        draw_lengths(Empirical(()), 1, np.random.default_rng(0))
    with pytest.raises(UserError, match="lengths.name: 'sharegtp' is not one of sharegpt"):
        draw_lengths(Named("sharegtp"), 1, np.random.default_rng(0))


def count(arrivals: object, low: float, high: float, duration_s: float = 400.0) -> int:
    work = draw_work(arrivals, LENGTHS, duration_s, 10**6, seed=1)  # type: ignore[arg-type]
    assert (np.diff(work.arrival_s) >= 0).all() and work.arrival_s[-1] <= duration_s
    return int(((work.arrival_s >= low) & (work.arrival_s < high)).sum())


def test_rates() -> None:
    assert count(Poisson(10.0), 0, 400) == pytest.approx(4000, rel=0.08)
    assert count(Ramp(0.0, 20.0), 0, 400) == pytest.approx(4000, rel=0.08)
    assert count(Ramp(0.0, 20.0), 180, 220) == pytest.approx(19 * 40, rel=0.15)
    assert count(OnOff(10.0, 20.0, 30.0), 20, 50) == 0
    assert count(OnOff(10.0, 20.0, 30.0), 0, 400) == pytest.approx(1600, rel=0.1)
    assert count(Bursts(0.0, 20.0, 100.0, 10.0), 0, 90) == 0
    assert count(Bursts(0.0, 20.0, 100.0, 10.0), 90, 100) == pytest.approx(200, rel=0.3)


def test_the_same_seed_gives_the_same_requests() -> None:
    first, again, other = (draw_work(Poisson(5.0), Named("alpaca"), 60.0, 1000, seed) for seed in (3, 3, 4))
    assert np.array_equal(first.arrival_s, again.arrival_s) and np.array_equal(first.output, again.output)
    assert not np.array_equal(first.arrival_s[:10], other.arrival_s[:10])
    faster = draw_work(Poisson(10.0), Named("alpaca"), 60.0, 1000, 3)
    assert np.array_equal(first.output[:100], faster.output[:100])
    assert draw_work(Closed(8), LENGTHS, 60.0, 20, 0).concurrency == 8


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,9\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,10,20,30,API\n9,GPT-4,7,0,7,API\n"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 50, "output_length": 4, "hash_ids": [1]}\n'
    '{"timestamp": 3500, "input_length": 60, "output_length": 8, "hash_ids": []}\n'
)


def trace(tmp_path: Path, text: str, **scaling: object) -> tuple[list[float], list[int], list[int]]:
    path = tmp_path / "trace"
    path.write_text(text)
    work = read_trace(path, Trace("trace", **scaling), 1e6, 1000)  # type: ignore[arg-type]
    return work.arrival_s.tolist(), work.prompt.tolist(), work.output.tolist()


def test_the_three_formats(tmp_path: Path) -> None:
    times, prompt, output = trace(tmp_path, AZURE)
    assert times == pytest.approx([0.0, 4.314579], abs=1e-5)
    assert (prompt, output) == ([374, 396], [44, 9])
    assert trace(tmp_path, BURSTGPT) == ([0.0], [10], [20])  # a failed request has no output
    assert trace(tmp_path, MOONCAKE) == ([0.0, 2.5], [50, 60], [4, 8])


def test_scaling(tmp_path: Path) -> None:
    times, prompt, output = trace(tmp_path, MOONCAKE, rate=0.2, length_scale=0.1)
    assert times == pytest.approx([0.0, 5.0])
    assert (prompt, output) == ([5, 6], [1, 1])
    assert trace(tmp_path, MOONCAKE, most=55)[1] == [50, 55]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "no known format: line 1"),
        ("", "no known format"),
        (AZURE + "yesterday,1,2\n", "line 4, cannot be read: .*yesterday"),
        (AZURE + "2023-11-16 18:15:51,12\n", "line 4, cannot be read: 2 cells, not 3"),
        (AZURE + "2023-11-16 18:15:51,12,many\n", "line 4, cannot be read: .*many"),
        (AZURE + "\n2023-11-16 18:15:51,-12,3\n", "line 5, cannot be read: negative"),
        (BURSTGPT.replace("5,GPT-4", "nan,GPT-4"), "line 2, cannot be read: .*impossible time"),
        (MOONCAKE + "{]\n", "line 3, cannot be read"),
        (MOONCAKE + '{"timestamp": 4, "input_length": 1}\n', "line 3, cannot be read: no field 'output_length'"),
        (MOONCAKE + "[1]\n", "line 3, cannot be read: not a JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as raised:
        trace(tmp_path, text)
    assert str(tmp_path / "trace") in str(raised.value)


def test_a_missing_or_binary_trace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace .*no-such: No such file"):
        read_trace(tmp_path / "no-such", Trace("x"), 1.0, 1)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read_trace(tmp_path / "binary", Trace("x"), 1.0, 1)
