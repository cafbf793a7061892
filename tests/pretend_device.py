"""Test support: tensors that are on a device, as far as torch's rules go, with their numbers in host memory.

A GPU lets no operation mix its tensors with the host's, gives no numpy view, and makes whoever reads it wait. Under
`PretendDevice` the same holds for tensors on `DEVICE`: mixing is an error, and copying to the host is counted. An
error is also what waits without saying so: a branch on what is on the device, or a result whose size depends on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy")  # any that torch knows and does not look for; nothing of it is used

# They wait for the device to know how large their result is.
_SIZED_BY_CONTENTS = (
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
)


class DeviceTensor(torch.Tensor):
    """Attributes: `inner`, the numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a device tensor outside `PretendDevice`")


class PretendDevice(TorchDispatchMode):
    """Attributes: `reads`, how often the host has read something of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self._counts = True

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Meanwhile anything goes: a test looks at what it has made."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == DEVICE.type:
            kwargs["device"] = torch.device("cpu")
            return _wrapped(func(*_unwrapped(args), **_unwrapped(kwargs)))  # made there, or copied to it
        if not on_device:
            return func(*args, **kwargs)
        if self._counts:
            self._judge(func, name, args, tensors)
        if name == "_to_copy" and target is not None:
            self.reads += self._counts
            return func(*_unwrapped(args), **kwargs)
        found = func(*_unwrapped(args), **_unwrapped(kwargs))
        if name.endswith("_") and not name.endswith("__"):
            return args[0]  # in place
        return _wrapped(found)

    def _judge(self, func: Any, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
        assert not strangers, f"{func} mixes tensors of the device with the host's, {strangers[0].shape}"
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal"), f"{func} reads the device without saying so"
        assert name not in _SIZED_BY_CONTENTS, f"{func} waits for the device to size its result"
        if name.startswith("index"):
            masks = [tensor for tensor in tensors if tensor.dtype == torch.bool and tensor is not args[0]]
            indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
            hidden = [mask for mask in masks if any(mask is index for index in indices)]
            assert not hidden, f"{func} by a mask waits for the device to count it"


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` there, without a copy."""
    return DeviceTensor(tensor)


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, which change with it."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


def _unwrapped(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.inner if isinstance(leaf, DeviceTensor) else leaf, tree)


def _wrapped(tree: Any) -> Any:
    return tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
