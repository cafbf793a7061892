"""What Nightjar adds to the scheduler's time per decode step, at batch 64 on an emulated GPU.

    scripts/python bench/overhead.py --json overhead.json

Two ways to find out, side by side:

- *profiled*: a clock that changes hands at every call between SGLang and Nightjar (`tests/metered_launch.py`) gives the
  time spent in each hook, in the planner, in the worker. What that clock costs itself is measured and taken off.
- *compared*: the CPU time of a scheduler iteration, the device's left out, over that of a server that never had a
  draft. It has in it what SGLang's own code does differently when it speculates.

The servers stay up and take turns of one full batch; a server's figure is over the steps of all its turns. Shares are
of a plain step: a whole decode step of the server without a draft, device and scheduler, as the emulated GPU and
this CPU take them (`SGLang step`); and, beside it, of that server's scheduler alone (`SGLang scheduler`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests")  # in place of this script's folder, whose platform.py would shadow the library's
sys.path.append(str(ROOT / "bench"))
import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from away import require_away, send_away  # noqa: E402
from load import prompt  # noqa: E402
from machine import machine  # noqa: E402
from metered_launch import CAPACITY, Layout  # noqa: E402
from overhead_report import AT_GAMMA_0, PLAIN, Steps, figures, full_steps, set_ups, table  # noqa: E402
from serving import Server, serve_all  # noqa: E402

from sglang_nightjar.simulate.setups import SET_UPS  # noqa: E402

NEVER, OFTEN = "0.05", "0.8"  # acceptances at which it speculates never, always
_NIGHTJAR: tuple[Any, ...] = ("--nightjar-policy", "nightjar", "--nightjar-cooldown-s", 86_400)
KINDS: dict[str, tuple[Any, ...]] = {
    PLAIN: ("--nightjar-policy", "off"),
    "gamma 0": (*_NIGHTJAR, "--nightjar-emulate-acceptance", NEVER),
    "away": (*_NIGHTJAR, "--nightjar-emulate-acceptance", NEVER),
    "journal": (*_NIGHTJAR, "--nightjar-emulate-acceptance", NEVER, "--nightjar-journal", "JOURNAL"),
    "speculating": (*_NIGHTJAR, "--nightjar-emulate-acceptance", OFTEN),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--set-up", default="4090-r1-qwen-7b", choices=list(SET_UPS))
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of server, besides {PLAIN}: {', '.join(KINDS)}")
    parser.add_argument("--batch", type=int, default=64, help="requests that decode together")
    parser.add_argument("--turns", type=int, default=6, help="of each server")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    options = parser.parse_args()

    kinds = list(dict.fromkeys((PLAIN, *options.kinds.split(","))))
    steps: dict[str, list[Steps]] = {kind: [] for kind in kinds}
    with servers(kinds, options) as started:
        for number in range(options.turns + 1):
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                taken = turn(started[kind], kind, number, options)
                if number > 0:  # the first is for warming up, and for the policy to learn
                    steps[kind].append(taken)
        if "away" in kinds:
            require_away(started["away"].server)
    context = options.prompt + options.tokens / 2
    result = {
        "machine": {**machine(), "load": os.getloadavg()[0]},
        "options": {name: str(value) for name, value in vars(options).items()},
        "servers": {kind: figures(turns, steps[PLAIN]) for kind, turns in steps.items()},
        "set_ups": set_ups(options.batch, options.batch * context),
    }
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


@dataclass
class Metered:
    """A server and the rows of its scheduler."""

    server: Server
    path: Path  # without suffix
    read: int = 0

    def new_rows(self) -> tuple[Layout, Any]:
        """The rows since the last call, int64 [n, columns], and the one before them."""
        layout = msgspec.json.decode(self.path.with_suffix(".json").read_bytes(), type=Layout)
        rows = np.memmap(self.path.with_suffix(".rows"), np.int64, "r", shape=(CAPACITY, layout.columns))
        count = int(rows[0, 0])
        if count + 1 >= CAPACITY:
            raise SystemExit(f"the scheduler made more than {CAPACITY - 2} iterations; take fewer turns")
        found = np.array(rows[max(self.read, 1) : count + 1])
        self.read = count
        return layout, found


@contextmanager
def servers(kinds: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, Metered]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-bench-")))
        words = [
            ["--nightjar-emulate", options.set_up, "--stream-interval", 1]
            + ["--max-running-requests", options.batch]
            + [folder / "journal" if word == "JOURNAL" else word for word in KINDS[kind]]
            for kind in kinds
        ]
        environ = {"METER_FOLDER": str(folder), "PYTHONPATH": str(ROOT / "tests")}
        found = stack.enter_context(serve_all(words, module="metered_launch", environ=environ))
        started = {
            kind: Metered(server, folder / server.url.rpartition(":")[2])
            for kind, server in zip(kinds, found, strict=True)
        }
        if "away" in started:
            send_away(started["away"].server)
        yield started


def turn(metered: Metered, kind: str, number: int, options: argparse.Namespace) -> Steps:
    """One full batch, streamed; the steps in which all of it decoded."""
    metered.new_rows()
    first = number * options.batch  # no prompt twice: none is cached
    prompts = [prompt(first + index, options.prompt, 0) for index in range(options.batch)]
    sampling = {"temperature": 0, "max_new_tokens": options.tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": prompts, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(metered.server.url + "/generate", body, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        for _ in response:
            pass
    time.sleep(0.05)  # until the last row is written
    layout, rows = metered.new_rows()
    found = full_steps(rows, layout, options.batch, speculating=kind not in (PLAIN, *AT_GAMMA_0))
    line = f"[bench] {kind}: {len(found.cpu)} steps in {time.perf_counter() - begin:.1f} s"
    print(line, file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
