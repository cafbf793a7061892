"""Threads of one rank: OpenMP (torch, oneDNN) and numba take turns on the same cores.

Both pools are as wide as the rank's share of the cores; OpenMP's workers must not spin
after a parallel region, or they take the cores numba needs next. The environment part
must be set before torch is imported, so the launcher does it for its children.
"""

import os
from collections.abc import Sequence

from sglang_nightjar.config import NightjarConfig, inherited_config


def thread_share(config: NightjarConfig, ranks: int) -> int:
    """Threads of one of `ranks` ranks: the configured number, or an equal share of the usable cores."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // ranks)


def core_groups(cores: Sequence[int], ranks: int) -> str:
    """SGLang's notation of which `cores` each rank has, such as `0,1|2,3`; shared where there are fewer than ranks."""
    share = max(1, len(cores) // ranks)
    firsts = [rank * share % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[first : first + share])) for first in firsts)


def set_thread_environment(config: NightjarConfig, ranks: int) -> None:
    """Sets what child processes must find before they import torch or numba; the user's own settings win."""
    share = str(thread_share(config, ranks))
    if ranks > 1:
        # SGLang expects a NUMA node per rank unless told which cores each one has.
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", core_groups(sorted(os.sched_getaffinity(0)), ranks))
    for name, value in {
        "OMP_NUM_THREADS": share,
        "MKL_NUM_THREADS": share,
        "NUMBA_NUM_THREADS": share,
        "OMP_WAIT_POLICY": "PASSIVE",
        # NumPy's own threads, for matrices we have none of; without them the launcher can fork (`process_start.py`).
        "OPENBLAS_NUM_THREADS": "1",
        # Compiling the small helpers SGLang decorates costs tens of seconds and gains nothing here.
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


def apply_thread_limits() -> None:
    """Applies the environment's share inside a rank; torch has already read OMP_NUM_THREADS."""
    import torch

    config = inherited_config()
    assert config is not None, "the CPU platform is active only in a process of a Nightjar server"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
