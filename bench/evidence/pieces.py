"""The pieces of evidence, each one command that anybody can type, and running them."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_nightjar.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Piece:
    """Attributes:

    name: of its JSON. level: of the evidence.
    line: what follows `scripts/python`, without `--json`.
    gib: of free memory that its servers take, of models on a CPU about 4 each, of emulated ones 2.4.
    gpu: it needs one.
    suite: it takes --jobs, and --keep, so that it can be stopped and taken up again. trace: it takes --trace.
    """

    name: str
    level: str
    line: str
    gib: int = 0
    gpu: bool = False
    suite: bool = False
    trace: bool = False

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    def hindrance(self) -> str | None:
        """Why it cannot be run on this machine now."""
        if self.gpu and not has_gpu():
            return "there is no NVIDIA GPU here"
        free = psutil.virtual_memory().available / 2**30
        return f"needs about {self.gib} GiB of free memory, and {free:.0f} are free" if free < self.gib else None


_SERVING = "bench/serving.py --repeats 2"
_SIMULATE = "-m sglang_nightjar.simulate"


def _emulated(set_up: str, speed: float) -> Piece:
    """Policies on an emulated device, at a speed at which this CPU's scheduler weighs little (docs/emulation.md)."""
    line = f"bench/serving.py --emulate {set_up} --emulate-speed {speed} --at-once 8 --loads c1,c8,c32,c128,ramp,bursts"
    policies = "off,off+no-draft,static:1,static:3,static:5,dsd,banditspec-ucb,nightjar"
    return Piece(f"emulated-{set_up}", "L2", f"{line} --policies {policies}", gib=20)


PIECES = (
    Piece("deciding", "L3", "bench/policy.py"),
    Piece("platform", "L3", "bench/platform.py --repeats 2 --max-tokens 32", gib=16),
    Piece("tax", "L3", "bench/tax.py", gib=8),
    Piece(
        "ladder",
        "L3",
        f"{_SERVING} --policies off,static:1,static:3,static:5,nightjar --loads c1,c4,c16,c48 --requests 24",
        gib=21,
    ),
    Piece(
        "ramp",
        "L3",
        f"{_SERVING} --policies off,static:1,static:3,static:5,nightjar --loads ramp --rate 2.5 --duration-s 60",
        gib=21,
    ),
    Piece(
        "ramp-learned",
        "L3",
        f"{_SERVING} --policies sglang-ema,dsd,banditspec-ucb,banditspec-exp3,nightjar --loads ramp --rate 2.5 "
        "--duration-s 60",
        gib=21,
    ),
    # 48 clients, whose requests need about three times the pool; then one, for whom the draft comes back. They may
    # end early, so SGLang admits more than fits and retracts some.
    Piece(
        "value",
        "L3",
        f"{_SERVING} --policies nightjar+elastic:off,nightjar --loads c48,c1 --max-tokens 128 "
        "--may-end --server-arguments='--max-total-tokens 2560 --schedule-conservativeness 0.3'",
        gib=8,
    ),
    _emulated("4090-r1-qwen-7b", speed=0.2),
    _emulated("a100-vicuna-13b", speed=0.2),
    _emulated("2xl20-qwen-32b", speed=0.25),
    Piece("lossless", "L2", "bench/lossless.py", gib=3),
    Piece("overhead", "L2", "bench/overhead.py", gib=13),
    Piece("calibrate", "L1 and L2", "bench/calibrate.py --at-once 3", gib=8),
    Piece("calibrate-real", "L1 to L3", "bench/calibrate.py --real", gib=8),
    Piece(
        "simulated-ramp",
        "L1",
        f"{_SIMULATE} --scenario 4090-ramp --policies off,static:3,nightjar,oracle --seeds 1",
    ),
    Piece("paper", "L1", f"{_SIMULATE} --suite paper", suite=True, trace=True),
    Piece("regret", "L1", f"{_SIMULATE} --suite regret", suite=True),
    Piece("gpu", "L4", "bench/gpu_check.py", gpu=True),
    Piece("kernels", "L4", "bench/kernels.py", gpu=True),
)


def has_gpu() -> bool:
    """As `scripts/gpu_check.sh` asks."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def chosen(names: str, without: str, folder: Path, say: Callable[[str], None]) -> list[Piece]:
    """The pieces to run: those named, or with `all` every one that can run here and whose JSON is not there yet.

    Raises:
        UserError: a name is unknown, or a named piece cannot run here.
    """
    known = {piece.name: piece for piece in PIECES}
    left_out = [name for name in without.split(",") if name]
    asked = [] if names == "all" else [name for name in names.split(",") if name]
    unknown = [name for name in (*asked, *left_out) if name not in known]
    if unknown:
        raise UserError(f"no piece is called {', '.join(unknown)}; known: {', '.join(known)}")
    if asked:
        for name in asked:
            if hindrance := known[name].hindrance():
                raise UserError(f"{name} cannot be run here: {hindrance}")
        return [known[name] for name in asked if name not in left_out]
    found = []
    for piece in PIECES:
        if piece.name in left_out:
            continue
        if (folder / f"{piece.name}.json").exists():
            say(f"{piece.name}: {folder / piece.name}.json is there, and is used again")
        elif hindrance := piece.hindrance():
            say(f"{piece.name} ({piece.level}) is left out: {hindrance}")
        else:
            found.append(piece)
    return found


def command(piece: Piece, folder: Path, json: Path, jobs: int, trace: Path | None) -> list[str]:
    """What follows `scripts/python`."""
    words = piece.words
    if piece.suite:
        words += ["--jobs", str(jobs), "--keep", str(folder / f"{piece.name}.runs")]
    if piece.trace and trace is not None:
        words += ["--trace", str(trace)]
    return [*words, "--json", str(json)]


def run(pieces: Sequence[Piece], folder: Path, jobs: int, trace: Path | None, say: Callable[[str], None]) -> list[str]:
    """Runs them one after the other; a JSON is in `folder` once its piece has ended well.

    Returns:
        Names of those that failed; the others were run nevertheless.
    """
    failed = []
    unfinished = folder / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces, 1):
        path = unfinished / f"{piece.name}.json"
        words = command(piece, folder, path, jobs, trace)
        say(f"{number} of {len(pieces)}: {piece.name} ({piece.level}): scripts/python {shlex.join(words)}")
        begin = time.perf_counter()
        status = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
        took = f"after {(time.perf_counter() - begin) / 60:.1f} min"
        if status == 0 and path.exists():
            path.replace(folder / path.name)
            say(f"{piece.name}: done {took}")
        else:
            failed.append(piece.name)
            say(f"{piece.name}: failed with status {status} {took}")
    return failed
