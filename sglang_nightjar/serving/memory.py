"""How many KV slots fit: decided before anything is loaded, so that too much is a message and not a crash."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_nightjar.errors import UserError

_CGROUP = Path("/sys/fs/cgroup")
_POOL_TOKENS = 32768  # KV slots taken when nothing is said, memory permitting
_POOL_SHARE = 0.5  # share of the memory left after weights that they may take then
_MIN_TOKENS = 128  # below this, two short requests at once would already find no slot
_MIN_PAGES = 4
# SGLang sizes the pool by a share of the free memory, less what the weights took, and by the
# number of tokens, whichever is smaller. The number is what we plan with.
_NO_LIMIT = 0.98


class ModelShape(msgspec.Struct, frozen=True):
    """What planning needs of a checkpoint. Bytes are those of all ranks together.

    Attributes:
        context_len: longest sequence, in tokens.
        vocab_size: rows of the embedding, padding included.
        heads, kv_heads, intermediate_size: what tensor parallelism divides.
        kv_bytes_per_token: K and V of all layers, in float32.
        weight_bytes: all parameters, in float32.
    """

    context_len: int
    vocab_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    kv_bytes_per_token: int
    weight_bytes: int


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes this process may still take: the machine's available memory, or less where a container has a limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
    except OSError:
        return available  # no unified control groups here
    return available if limit.strip() == "max" else min(available, max(0, int(limit) - int(used)))


def plan_memory(
    options: Mapping[str, Any], shapes: Sequence[ModelShape], available: int, device_bytes: int | None = None
) -> dict[str, Any]:
    """Sizes the KV pool.

    Args:
        options: completed `ServerArgs` fields.
        shapes: the target, then the draft if there is one.
        available: bytes for models and KV cache.
        device_bytes: of them to use (`--nightjar-device-memory`); None: as SGLang's own options say.
    Returns:
        The fields to set: `max_total_tokens` and `mem_fraction_static`.
    Raises:
        UserError: a size is impossible, or the models do not fit.
    """
    fraction = options.get("mem_fraction_static")
    tokens = options.get("max_total_tokens")
    page = options.get("page_size") or 1
    least = max(_MIN_TOKENS, _MIN_PAGES * page)
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise UserError(f"--mem-fraction-static is {fraction}; choose a value between 0 and 1, for example 0.8")
    if tokens is not None and tokens < least:
        raise UserError(f"--max-total-tokens is {tokens}; choose at least {least}, or leave it out")

    if device_bytes is not None:
        if fraction is not None:
            raise UserError("--nightjar-device-memory and --mem-fraction-static say the same; give one of them")
        if device_bytes > available:
            raise UserError(
                f"--nightjar-device-memory is {_gib(device_bytes)} and {_gib(available)} are left on this machine; "
                "choose less"
            )
        available, fraction = device_bytes, 1.0
    # The plain weights of the target stay beside their prepacked copy.
    weights = 2 * shapes[0].weight_bytes + sum(shape.weight_bytes for shape in shapes[1:])
    per_token = sum(shape.kv_bytes_per_token for shape in shapes)
    free = int(available * (fraction or 1.0)) - weights
    room = free // per_token // page * page
    if room < least:
        given = ""
        if fraction is not None and device_bytes is None:
            given = f" and --mem-fraction-static {fraction} allows {_gib(available * fraction)}"
        remedy = "use a smaller model" if fraction is None else "raise it, or use a smaller model"
        raise UserError(
            f"the models and {least} tokens of KV cache need {_gib(weights + least * per_token)} of memory, "
            f"{_gib(available)} are left for them{given}; {remedy}"
        )
    if tokens is None:
        default = min(_POOL_TOKENS, max(least, int(room * _POOL_SHARE)))
        tokens = room if fraction is not None else default // page * page
    elif tokens > room:
        raise UserError(
            f"--max-total-tokens {tokens} needs {_gib(tokens * per_token)} of KV cache and {_gib(free)} are left "
            f"after the weights; choose at most {room}"
        )
    return {"max_total_tokens": tokens, "mem_fraction_static": _NO_LIMIT}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
