"""Calls of the CUDA driver API, from any thread, their failures as exceptions."""

import importlib
import threading
from typing import Any


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; names the call and the result.

    Where an arena lets it through instead of a `CommitError`, undoing failed as well: the arena is lost.
    """


class CudaDriver:
    """The driver, for one device, whose primary context (torch's) is made current in every thread that calls.

    Args:
        ordinal: of the device, as CUDA counts.
        bindings: what has the functions and types of `cuda.bindings.driver`, which it is by default.

    Attributes:
        ordinal: as given.
        types: where the driver's types and enumerations are.

    Raises:
        DriverError: there is no such device.
    """

    def __init__(self, ordinal: int, bindings: Any = None) -> None:
        self.ordinal = ordinal
        self.types = importlib.import_module("cuda.bindings.driver") if bindings is None else bindings
        self._thread = threading.local()
        self._answer("cuInit", 0)
        device = self._answer("cuDeviceGet", ordinal)
        self._context = self._answer("cuDevicePrimaryCtxRetain", device)  # for as long as the process lives

    def call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver call, if it has one; `DriverError` where it fails."""
        if not hasattr(self._thread, "entered"):
            self._answer("cuCtxSetCurrent", self._context)
            self._thread.entered = True
        return self._answer(name, *arguments)

    def _answer(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self.types, name)(*arguments)
        if int(result) != 0:
            raise DriverError(f"{name}: {result.name}")
        return values[0] if values else None
