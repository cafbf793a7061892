"""The documents show what docs/results holds; `bench/report.py` takes, writes, checks."""

import json
from pathlib import Path
from typing import Any

import pytest
import report
from evidence.documents import Documents
from evidence.pictures import Picture, digest
from evidence.sources import Source, reader

ROOT = Path(__file__).resolve().parents[3]
ROW = {"batch": 1, "off_ms": 10.0, "away_ms": 10.1, "ratio": 1.01, "ratios": [1.0, 1.01, 1.02]}
ABOUT = {"cpu": "a CPU", "cores": 2, "commit": "abc", "date": "2026-11-30", "command": "scripts/python bench/tax.py"}
TEXT = """# Results

<!-- awaits about tax -->
<!-- end -->
<!-- awaits tax tax -->

by hand

<!-- end -->
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "results.md").write_text(TEXT)
    (folder / "other.md").write_text("# No blocks here\n")
    return folder


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "tax.json").write_text(json.dumps({"machine": ABOUT, "rows": [ROW]}))
    return folder


def test_this_repository_shows_what_it_holds() -> None:
    documents = Documents(ROOT / "docs")
    assert documents.problems() == []
    assert {"paper", "regret", "ladder", "value", "gpu"} <= set(documents.used())


def test_tables_are_made_of_a_folder_of_files(docs: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (measured / "unknown.json").write_text("{}")
    assert report.main(["--check"], docs) == 0
    assert "not in docs/results yet, so by hand in the documents: tax\n" in capsys.readouterr().err
    assert report.main(["--from", str(measured)], docs) == 0
    assert "unknown.json is left out" in capsys.readouterr().err
    text = (docs / "results.md").read_text()
    assert "| 1 | 10.0 | 10.1 | 1.010 | 1.000 1.010 1.020 |" in text and "by hand" not in text
    assert "L3, real models on a CPU; a CPU, 2 cores; 2026-11-30, commit abc" in text
    assert "```bash\nscripts/python bench/tax.py\n```" in text
    assert report.main(["--check"], docs) == 0
    assert report.main([], docs) == 0 and (docs / "results.md").read_text() == text, "writing twice changes nothing"


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("results.md", "1.010", "0.999", "not what docs/results holds: 'tax tax'"),
        ("results/tax.json", "10.1", "10.2", "not what docs/results holds: 'tax tax'"),
        ("results/tax.json", "abc", "def", "'about tax', 'tax tax'"),
        ("results.md", "<!-- begin about tax -->", "<!-- begin tax tax -->", "no block 'about tax'"),
        ("results.md", "begin tax tax", "begin tax other", "nothing in docs/results for the block 'tax other'"),
    ],
)
def test_a_check_finds(
    file: str, old: str, new: str, problem: str, docs: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--from", str(measured)], docs) == 0
    changed(docs / file, old, new)
    assert report.main(["--check"], docs) == 1
    assert problem in capsys.readouterr().err


def test_a_check_finds_a_file_and_a_picture_that_are_shown_nowhere(docs: Path, measured: Path) -> None:
    assert report.main(["--from", str(measured)], docs) == 0
    (docs / "plots").mkdir()
    (docs / "plots" / "old.png").touch()
    (docs / "results" / "old.json").touch()
    problems = Documents(docs).problems()
    assert [problem.rsplit("/", 1)[1] for problem in problems] == [
        "old.json is shown nowhere",
        "old.png is shown nowhere",
    ]


def test_a_folder_that_is_not_there_is_an_error(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--from", str(docs / "none")], docs) == 1
    assert report.main(["--run", "tax"], docs) == 1
    assert "--run needs --from FOLDER" in capsys.readouterr().err


def test_too_large_a_file_is_refused(docs: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (measured / "tax.json").write_text(json.dumps({"machine": ABOUT, "rows": [{**ROW, "ratios": [1.01] * 50_000}]}))
    assert report.main(["--from", str(measured)], docs) == 1
    assert "250000 is the limit" in capsys.readouterr().err and not (docs / "results").exists()


def test_a_picture_of_other_figures_is_not_shown(docs: Path, measured: Path) -> None:
    sample = {"policy": "off", "load": "c1", "repeat": 0, "output_throughput": 1.0}
    served: dict[str, Any] = {"machine": ABOUT, "options": {"policies": "off", "loads": "c1"}, "samples": [sample]}
    (measured / "ladder.json").write_text(json.dumps({**served, "servers": {}}))
    page = docs / "results.md"
    page.write_text("<!-- awaits about ladder -->\n<!-- end -->\n<!-- awaits picture ladder -->\n<!-- end -->\n")
    assert report.main(["--from", str(measured)], docs) == 0 and "No picture of these figures yet" in page.read_text()
    plots, source = docs / "plots", reader(docs / "results")("ladder")
    assert source is not None
    plots.mkdir()
    (plots / "ladder.png").touch()
    (plots / "drawn.json").write_text(json.dumps({"ladder": digest(source)}))
    assert report.main([], docs) == 0 and "![Throughput by load](plots/ladder.png)" in page.read_text()
    changed(docs / "results" / "ladder.json", "c1", "c2")
    assert report.main([], docs) == 0 and "No picture of these figures yet" in page.read_text()


def test_pictures_have_names_of_their_own_and_say_why_there_is_none(tmp_path: Path) -> None:
    course = {"time_s": [1.0], "slots": [64]}
    known = {
        "nightjar+elastic:off": {"timeline": course},
        "off": {"timeline": {}},
        "old": {"timeline": [[0.0, 1, 0, 9, 0]]},
    }
    source = Source("value", "serving", "L3", ABOUT, {"servers": known})
    assert Picture(source).name == "value" and Picture(source).lacks() is None
    picture = Picture(source, "nightjar+elastic:off")
    assert picture.name == "value-nightjar-elastic-off" and picture.lacks() is None
    assert picture.shown(tmp_path).startswith("No picture of these figures yet")
    for policy in ("off", "old"):
        assert (
            Picture(source, policy).shown(tmp_path) == f"No picture: value.json kept no course of {policy} over time."
        )
    assert Picture(source, "dsd").lacks() == "value.json has no server dsd"
    assert Picture(Source("tax", "tax", "L3", ABOUT, {})).lacks() is not None
