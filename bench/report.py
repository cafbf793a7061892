"""Evidence of all levels: runs the benchmarks, keeps their figures in docs/results, writes the documents' tables.

    scripts/python bench/report.py --list                            what there is to run
    scripts/python bench/report.py --from FOLDER --run ladder,tax    run these, then as below
    scripts/python bench/report.py --from FOLDER --run all           all that can run here and is not in FOLDER yet
    scripts/python bench/report.py --from FOLDER                     take the JSON files in FOLDER, write the tables
    scripts/python bench/report.py --plots                           draw what is out of date (needs matplotlib)
    scripts/python bench/report.py --check                           fails where a table is not what docs/results holds

A benchmark writes NAME.json. What the tables need of it is kept in docs/results/NAME.json; blocks of docs/*.md,
marked by comments (`bench/evidence/blocks.py`), are made of that alone; the prose between them is written by hand.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = str(ROOT / "bench")
if sys.path[0] == BENCH:  # run as a script: `platform.py` there would shadow the standard library's
    sys.path[0] = str(ROOT)
sys.path += [str(ROOT / "tests"), BENCH]  # last, for the same reason
from evidence.documents import Documents  # noqa: E402
from evidence.pieces import PIECES, chosen, run  # noqa: E402

from sglang_nightjar.errors import UserError  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--from", dest="folder", type=Path, metavar="FOLDER", help="the benchmarks' JSON files")
    p.add_argument("--run", metavar="NAME,...", help="run these first, or `all` that is missing; writes into --from")
    p.add_argument("--without", metavar="NAME,...", default="", help="of `all`, leave these out")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of a simulator's suite (default: 1)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="Azure trace for the suite `paper`")
    p.add_argument("--plots", action="store_true", help="draw pictures that are missing or of other figures")
    p.add_argument("--list", action="store_true", help="print the pieces and their commands")
    p.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a table is wrong")
    return p


def main(arguments: list[str] | None = None, docs: Path = ROOT / "docs") -> int:
    """Runs the command; the exit status."""
    options = parser().parse_args(arguments)
    if options.list:
        for piece in PIECES:
            hindrance = piece.hindrance()
            print(f"{piece.name:15} {piece.level:10} scripts/python {piece.line} --json {piece.name}.json")
            if hindrance:
                print(f"{'':26} not here: {hindrance}")
        return 0
    try:
        return check(docs) if options.check else report(options, docs)
    except UserError as error:
        print(f"[report] error: {error}", file=sys.stderr)
        return 1


def check(docs: Path) -> int:
    """1 where the documents are not what docs/results holds."""
    documents = Documents(docs)
    problems = documents.problems()
    for problem in problems:
        print(f"[report] {problem}", file=sys.stderr)
    if missing := documents.missing():
        say(f"not in docs/results yet, so by hand in the documents: {', '.join(missing)}")
    return 1 if problems else 0


def report(options: argparse.Namespace, docs: Path) -> int:
    """Runs, takes, draws and writes, as asked; 1 where a benchmark failed."""
    failed: list[str] = []
    if options.run:
        if options.folder is None:
            raise UserError("--run needs --from FOLDER, to write the JSON files into")
        folder, trace = options.folder.resolve(), options.trace and options.trace.resolve()
        failed = run(chosen(options.run, options.without, folder, say), folder, options.jobs, trace, say)
    documents = Documents(docs)
    if options.folder is not None:
        if not options.folder.is_dir():
            raise UserError(f"--from {options.folder}: no such folder")
        documents.take(options.folder, say)
    if options.plots:
        documents.draw(say)
    documents.write(say)
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; what they wrote is in {options.folder / 'unfinished'}")
    return 0


def say(message: str) -> None:
    print(f"[report] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
