"""The demo pair's step times and acceptance on this machine, as the emulator and the simulator take them."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from contenders import running, start
from load import send
from loads import Rules, draw, read_lengths

from sglang_nightjar.observe.journal import read_journal
from sglang_nightjar.simulate.fields import as_json
from sglang_nightjar.simulate.from_journal import measure

# Batch sizes of which steps are wanted, and prompts of more lengths than one: a prefill has a fixed part too.
_LOADS = ("c1", "c2", "c4", "c8", "c16")
_LENGTHS = ("16:24", "96:24")
_PER_CLIENT = 2


def measure_pair(folder: Path, options: argparse.Namespace) -> tuple[str, str]:
    """Serves the pair under `random`, and gives what `--nightjar-emulate` and `--nightjar-emulate-acceptance` take.

    Args:
        folder: for both files. options: of `calibrate.py`; where `measured` is given, the first is kept there.
    """
    real = argparse.Namespace(**{**vars(options), "emulate": "", "emulate_speed": 1.0})
    with ExitStack() as stack:
        (served,) = start(["random"], stack, folder, real)
        with running([served]):
            for number, (load, lengths) in enumerate((load, each) for load in _LOADS for each in _LENGTHS):
                clients = int(load[1:])
                requests = max(8, _PER_CLIENT * clients)
                work = draw(load, Rules(1.0, 1.0, read_lengths(lengths), requests))
                send(served.server.url, work, speed=1.0, seed=100 + number)
                print(f"[calibrate] measured {load} {lengths}", file=sys.stderr, flush=True)
    name = options.measured.stem if options.measured else "demo-pair"
    points = measure([served.journal], name)
    path = options.measured or folder / f"{name}.json"
    path.write_bytes(as_json(points))
    spec = folder / "acceptance.json"
    spec.write_text(json.dumps(uniform(agreement(read_journal(served.journal)))))
    print(f"[calibrate] {points} {spec.read_text()}", file=sys.stderr, flush=True)
    return str(path), str(spec)


def agreement(records: list[dict[str, Any]]) -> float:
    """Of drafts that were verified with all before them accepted, the share that was accepted too.

    Steps count in which all drafted; requests that ended in one do not: their last drafts were cut off.
    """
    accepted = refused = 0
    for record in records:
        if record["record"] != "step" or record.get("gamma", 0) == 0 or record.get("batch_size", 0) == 0:
            continue
        if record.get("drafted", -1) not in (-1, record["batch_size"]):
            continue
        for drafts, requests in enumerate(record["committed"]):
            accepted += drafts * requests
            refused += requests if drafts < record["gamma"] else 0
    if not accepted + refused:
        raise SystemExit("the journal has no step in which all requests drafted")
    return accepted / (accepted + refused)


def uniform(alpha: float) -> dict[str, Any]:
    """An `AcceptanceSpec` of one alpha for all requests."""
    return {"domains": [{"alpha": alpha, "concentration": 1e9}]}
