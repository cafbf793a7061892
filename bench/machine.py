"""Where and on what a benchmark runs: `machine` for the benchmarks.

    scripts/python bench/machine.py > paper.about.json

prints it. With commit and command put right by hand, such a file tells `bench/report.py` about a `paper.json` of
an earlier version, which did not say so itself.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a script: `platform.py` here would shadow the standard library's
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from sglang_nightjar.observe.machine import machine  # noqa: E402

__all__ = ["machine"]

if __name__ == "__main__":
    print(json.dumps(machine(), indent=2))
