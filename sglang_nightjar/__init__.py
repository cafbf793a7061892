"""Nightjar: adaptive speculative decoding and elastic memory as a layer on SGLang.

Importing this package imports neither SGLang nor torch; `Engine` does, when it is
first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_nightjar.engine import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sglang_nightjar.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
