"""The end-to-end part of `gpu_check`, which knows no device, on the CPU platform; and what it says of a refusal."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def end_to_end() -> Iterator[ModuleType]:
    path = list(sys.path)
    sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
    import gpu_end_to_end

    yield gpu_end_to_end
    sys.path[:] = path


def test_gamma_switches_and_a_draft_leaves_and_returns_under_load(
    end_to_end: ModuleType, tiny_target: Path, tiny_draft: Path
) -> None:
    rows = end_to_end.check_end_to_end(
        str(tiny_target), str(tiny_draft), ["--max-total-tokens", "1024"], prompts=["a", "over the hills", "b c d"]
    )
    assert {row.result for row in rows} == {"ok"}
    switching, moving = rows[:2], rows[2:]
    assert len(switching[0].values["steps"]) == 6 and all(switching[0].values["steps"])
    assert [row.check for row in moving[:4]] == [f"to {residency} under load" for residency in end_to_end.MOVES]
    assert moving[0].values["slots"] > moving[1].values["slots"]
    for texts in (switching[1].values, moving[-1].values):
        assert 0 < texts["same"] == texts["answers"], "on a CPU every text is what it was"


def test_a_server_that_refuses_is_quoted(end_to_end: ModuleType, tiny_target: Path, tiny_draft: Path) -> None:
    rows = end_to_end.check_end_to_end(
        str(tiny_target), str(tiny_draft), ["--chunked-prefill-size", "-1"], prompts=["a", "over the hills", "b c d"]
    )
    row = rows[-1]
    assert row.result == "refused" and "--nightjar-elastic on needs prompts in chunks" in row.figure
