"""What a figure says about where, when and on what it was made."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sglang_nightjar

_ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """CPU, usable cores, commit, date, and the command line of this process.

    commit: `-dirty` where files other than documents were changed since; a version where this is no checkout.
    """
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": cpu[0] if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command(sys.orig_argv),
    }


def command(words: list[str]) -> str:
    """`words` as one would type them in a checkout; the first is the interpreter, which `scripts/python` finds."""
    root = f"{_ROOT}/"
    return shlex.join(["scripts/python", *(word.removeprefix(root) for word in words[1:])])


def _commit() -> str:
    if not (_ROOT / ".git").exists():
        return f"sglang-nightjar {sglang_nightjar.__version__}"
    found = _git("describe", "--always").stdout.strip()
    changed = _git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)docs").returncode != 0
    return f"{found}-dirty" if changed else found


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
