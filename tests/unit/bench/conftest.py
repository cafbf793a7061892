"""Benchmarks are scripts, not a package: their folder goes to the end of the path, where it hides nothing."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))
