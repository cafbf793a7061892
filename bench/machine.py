"""What a benchmark says about where and on what it ran."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """CPU, usable cores, commit and date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": cpu[0] if cpu else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }
