"""The state of a policy's own random numbers as JSON-ready values, for snapshots."""

import random
from typing import Any


def save_random(source: random.Random) -> list[Any]:
    """Where `source` is in its sequence."""
    version, internal, gauss = source.getstate()
    return [version, list(internal), gauss]


def load_random(source: random.Random, saved: list[Any]) -> None:
    """Puts `source` where it was when `saved` was taken."""
    version, internal, gauss = saved
    source.setstate((version, tuple(internal), gauss))
