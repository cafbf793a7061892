"""How the cores of a machine are divided among ranks."""

import os

import pytest

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.platform.threads import core_groups, set_thread_environment, thread_share


@pytest.mark.parametrize(
    ("cores", "ranks", "groups"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([3, 5, 7, 9, 11], 2, "3,5|7,9"),
        ([4], 2, "4|4"),  # fewer cores than ranks: shared
        ([0, 1], 4, "0|1|0|1"),
    ],
)
def test_core_groups(cores: list[int], ranks: int, groups: str) -> None:
    assert core_groups(cores, ranks) == groups


def test_ranks_share_the_cores_and_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NUMBA_NUM_THREADS": "7"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    config = NightjarConfig()
    assert [thread_share(config, ranks) for ranks in (1, 2, 3, 8)] == [4, 2, 1, 1]
    set_thread_environment(config, 2)
    assert os.environ["OMP_NUM_THREADS"] == "2" and os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert os.environ["NUMBA_NUM_THREADS"] == "7"
