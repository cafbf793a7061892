"""What several tests of this room start from."""

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from arena_kinds import Kind, Place
from fake_cuda import FakeCuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A device nothing is on; at the end no rule of CUDA must have been broken."""
    fake = FakeCuda()
    with closing(fake):
        yield fake
        assert not fake.violations


@pytest.fixture(scope="module", params=["posix", "cuda"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """Which memory a suite runs over. A device of its own for each example: `kind.place`."""
    chosen = Kind(request.param)
    yield chosen
    gc.collect()
    assert not chosen.broken


class Owner:
    """Of a device that lasts for one test."""


@pytest.fixture
def place(kind: Kind, tmp_path: Path) -> Iterator[Place]:
    """A device for one test."""
    owner = Owner()
    found = kind.place(owner, tmp_path)
    yield found
    found.end()
