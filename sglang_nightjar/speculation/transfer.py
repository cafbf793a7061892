"""Between the host, where a step is planned, and the device, where its tensors are.

On a CPU the two are one, and nothing is copied. On a GPU a reader waits for the work on the current stream, which
makes what it reads, and for no other; what goes there goes through pinned memory, and nobody waits. No
function here, and none that uses them, waits for the whole device. Untested on a GPU.
"""

import time
from typing import Any, Protocol

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the host, once it has been computed."""
    return tensor if tensor.device.type == "cpu" else tensor.to("cpu")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, of the host, on `device`, for what is launched on the current stream from now on."""
    return tensor if device.type == "cpu" else _pinned(tensor).to(device, non_blocking=True)


def all_to_device(device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same for several int64 [n_i] at once, in one copy."""
    if device.type == "cpu":
        return tensors
    return to_device(torch.cat(tensors), device).split([len(tensor) for tensor in tensors])


def host_lengths(batch: Any) -> torch.Tensor:
    """`seq_lens` of an SGLang batch on the host, int64 [B]; its own copy where it keeps one."""
    if batch.seq_lens.device.type == "cpu" or batch.seq_lens_cpu is None:
        return to_host(batch.seq_lens).to(torch.int64)
    return batch.seq_lens_cpu.to(torch.int64)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


class Stopwatch(Protocol):
    """How long some of a step's work takes on its device, s."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float:
        """0 where it never ran. Asked after something launched after `stop` has been read on the host."""
        ...


class HostStopwatch:
    """For a device that is done when a call returns."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        return self._seconds


class CudaStopwatch:
    """Two events on the current stream; reading them waits for nothing, since the host has read later work."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._ran = False

    def start(self) -> None:
        self._began.record()

    def stop(self) -> None:
        self._ended.record()
        self._ran = True

    def seconds(self) -> float:
        return self._began.elapsed_time(self._ended) / 1e3 if self._ran else 0.0


def stopwatch(device: torch.device) -> Stopwatch:
    """One that has not run."""
    return HostStopwatch() if device.type == "cpu" else CudaStopwatch()
