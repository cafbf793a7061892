"""Which pieces are run, by which commands, and what a failure does. No benchmark is run here."""

import shlex
import sys
from pathlib import Path

import pytest
from evidence import pieces
from evidence.kinds import sources_of
from evidence.pieces import PIECES, Piece, chosen, command, run

from sglang_nightjar.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{}')"


def script(name: str, code: str, **more: bool) -> Piece:
    return Piece(name, "L3", f"-c {shlex.quote(code)}", **more)


def test_every_piece_is_a_command_of_this_repository() -> None:
    for piece in PIECES:
        script, *words = piece.words
        if script == "-m":
            script = "sglang_nightjar/simulate/__main__.py"
        source = (ROOT / script).read_text()
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [flag for flag in flags if f'"{flag}"' not in source] == [], piece.name
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    assert {piece.level for piece in PIECES if piece.gpu} == {"L4"}


def test_the_documents_show_every_piece() -> None:
    from evidence.documents import Documents

    used = Documents(ROOT / "docs").used()
    assert [piece.name for piece in PIECES if piece.name not in used] == []
    assert sources_of("beside-paper", ["a", "b"]) == ["a", "b"] and sources_of("closed", ["a", "b"]) == ["a"]


def test_all_is_what_can_run_here_and_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Piece("small", "L3", "x", gib=8), Piece("large", "L3", "x", gib=16)
    graphic, suite, made = Piece("graphic", "L4", "x", gpu=True), Piece("suite", "L1", "x"), Piece("made", "L1", "x")
    monkeypatch.setattr(pieces, "PIECES", (small, large, graphic, suite, made))
    monkeypatch.setattr(pieces, "has_gpu", lambda: False)
    monkeypatch.setattr(pieces.psutil, "virtual_memory", lambda: type("Free", (), {"available": 9 << 30}))
    (tmp_path / "made.json").touch()
    said: list[str] = []
    assert chosen("all", "suite", tmp_path, said.append) == [small]
    assert [line.partition(":")[2].partition(" ")[2] for line in said] == [
        "needs about 16 GiB of free memory, and 9 are free",
        "there is no NVIDIA GPU here",
        f"{tmp_path / 'made'}.json is there, and is used again",
    ]
    assert chosen("made,small", "small", tmp_path, said.append) == [made], "by name also again"
    with pytest.raises(UserError, match="graphic cannot be run here: there is no NVIDIA GPU"):
        chosen("graphic", "", tmp_path, said.append)
    with pytest.raises(UserError, match="no piece is called taxes, rams; known: small, large"):
        chosen("taxes", "rams", tmp_path, said.append)


def test_commands(tmp_path: Path) -> None:
    known = {piece.name: piece for piece in PIECES}
    words = command(known["paper"], tmp_path, tmp_path / "x.json", 2, Path("trace.csv"))
    assert words[:4] == ["-m", "sglang_nightjar.simulate", "--suite", "paper"]
    kept = ["--jobs", "2", "--keep", str(tmp_path / "paper.runs")]
    assert words[4:] == [*kept, "--trace", "trace.csv", "--json", str(tmp_path / "x.json")]
    assert command(known["tax"], tmp_path, Path("x.json"), 2, Path("trace.csv")) == ["bench/tax.py", "--json", "x.json"]


def test_one_failure_spares_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    made = [script("bad", f"{WRITES}; sys.exit(3)"), script("good", WRITES)]
    assert run(made, tmp_path, 1, None, said.append) == ["bad"]
    assert (tmp_path / "good.json").exists() and not (tmp_path / "bad.json").exists()
    assert (tmp_path / "unfinished" / "bad.json").exists(), "what there is of it is not lost"
    assert said[0].startswith("1 of 2: bad (L3): scripts/python -c ") and "status 3" in said[1]
    assert sys.executable not in " ".join(said)
