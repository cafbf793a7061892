"""What the serving benchmarks send, to whom, and how they convert what comes back."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_nightjar.emulate.set_up import find_emulated
from sglang_nightjar.simulate.setups import SET_UPS
from sglang_nightjar.simulate.workload import Fixed

NAME = "4090-r1-qwen-7b"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{15 + second // 60}:{second % 60:02}.0000000,1000,{200 + second}\n" for second in range(120)
)


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    path = list(sys.path)
    sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
    import capacity
    import client
    import contenders
    import loads
    import measured_pair
    import prompts
    import serving_report

    yield SimpleNamespace(
        capacity=capacity,
        client=client,
        contenders=contenders,
        loads=loads,
        measured_pair=measured_pair,
        prompts=prompts,
        report=serving_report,
    )
    sys.path[:] = path


def test_loads_by_name(bench: SimpleNamespace, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE)
    rules = bench.loads.Rules(10.0, 60.0, Fixed(30, 20), trace=str(trace))
    closed = bench.loads.draw("c16", rules)
    assert closed.concurrency == 16 and len(closed.prompt) == 48
    for load, mean in (("r4", 4.0), ("x0.4", 4.0), ("ramp", 6.5), ("bursts", 5.0)):
        work = bench.loads.draw(load, rules)
        assert work.concurrency is None and len(work.prompt) / 60.0 == pytest.approx(mean, rel=0.25), load
    recorded = bench.loads.draw("trace", rules)
    assert len(recorded.prompt) == 120 and recorded.arrival_s[-1] == pytest.approx(119 / 8.0)
    assert recorded.prompt[0] == round(1000 * 499 / 1366), "lengths of ShareGPT's mean"
    again, other = bench.loads.draw("ramp", rules), bench.loads.draw("ramp", rules, seed=1)
    assert np.array_equal(again.arrival_s, bench.loads.draw("ramp", rules).arrival_s)
    assert not np.array_equal(again.arrival_s[:5], other.arrival_s[:5])


@pytest.mark.parametrize("load", ["d3", "c", "x", "trace"])
def test_a_load_that_is_none(bench: SimpleNamespace, load: str) -> None:
    with pytest.raises(SystemExit, match=f"{load!r} is none of cN, rR, xS"):
        bench.loads.draw(load, bench.loads.Rules(1.0, 10.0))


def test_prompts_have_the_tokens_they_are_to_have(bench: SimpleNamespace, tmp_path: Path) -> None:
    work = bench.loads.at_least(bench.loads.draw("c4", bench.loads.Rules(1.0, 1.0)), bench.prompts.TEMPLATE + 1)
    lines = bench.prompts.write_random(work, tmp_path / "requests", 0).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["max_tokens"] for row in rows] == work.output.tolist()
    contents = [row["messages"][0]["content"] for row in rows]
    assert [len(content) + bench.prompts.TEMPLATE for content in contents] == work.prompt.tolist()
    assert len(set(contents)) == len(contents)


def test_wall_time_becomes_emulated_time(bench: SimpleNamespace) -> None:
    found = {"duration": 50.0, "mean_ttft_ms": 400.0, "output_throughput": 30.0, "request_goodput": 0.5}
    found |= {"completed": 9, "slo_attainment": 0.75, "backend": "x", "generated_texts": ["a"]}
    assert bench.client.converted(found, 0.1) == {
        "duration": 5.0,
        "mean_ttft_ms": 40.0,
        "output_throughput": 300.0,
        "request_goodput": 5.0,
        "completed": 9,
        "slo_attainment": 0.75,
    }


def test_the_command_line_of_a_policy(bench: SimpleNamespace) -> None:
    options = argparse.Namespace(emulate=NAME, emulate_speed=0.1, acceptance="0.7", server_arguments=[])

    def words(policy: str) -> list[str]:
        return list(map(str, bench.contenders.words(policy, Path("j"), options)))

    with_draft = str(find_emulated(NAME).slots(resident=True))
    assert words("off")[words("off").index("--max-total-tokens") + 1] == with_draft
    assert "--max-total-tokens" not in words("off+no-draft") and "--nightjar-journal" not in words("off+no-draft")
    assert words("nightjar+elastic:off+seed:3")[-6:-2] == ["--nightjar-elastic", "off", "--nightjar-seed", "3"]
    with pytest.raises(SystemExit, match="no-draft goes with `off`"):
        words("static:3+no-draft")


def test_giving_back_the_weights_alone_gives_less(bench: SimpleNamespace) -> None:
    for set_up in SET_UPS.values():
        assert set_up.slots(True) < bench.capacity.weights_only(set_up) < set_up.slots(False)
    # 988 MB of draft weights are 17,229 slots of 57,344 bytes.
    assert bench.capacity.weights_only(SET_UPS[NAME]) - SET_UPS[NAME].slots(True) == 17_229


def test_answers_are_compared_request_by_request(bench: SimpleNamespace) -> None:
    samples = [
        {"load": load, "repeat": 0, "policy": policy, "answers": answers}
        for load, policy, answers in (("c1", "a", [1, 2]), ("c1", "b", [1, 3]), ("c1", "c", [1, 2]), ("c2", "b", [9]))
    ]
    told = bench.report.answers(samples)
    assert told == "4 answers compared with another policy's to the same request: 1 differ"


def test_agreement_counts_drafts_that_were_tried(bench: SimpleNamespace) -> None:
    def step(gamma: int, committed: list[int], **more: int) -> dict[str, object]:
        return {"record": "step", "batch_size": sum(committed), "gamma": gamma, "committed": committed, **more}

    # Three requests at gamma 2: none accepted, one, both: 3 accepted, 2 refused.
    seen = [step(2, [1, 1, 1]), step(0, [5]), step(2, [3, 0, 0], drafted=2), {"record": "state"}]
    assert bench.measured_pair.agreement(seen) == 3 / 5
