"""Test support: what becomes of a process that reads an address."""

import ctypes
import faulthandler
import os
import resource


def signal_of_touching(address: int) -> int:
    """The signal that ends a process which reads a byte at `address`, 0 for none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(address, 1)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])
