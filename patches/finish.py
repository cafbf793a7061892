"""Seam: `Req.update_finish_state`, which decides after each step whether a request is done.

A verified run brings several tokens at once. Upstream looks for stop strings in the whole
run before it looks for stop tokens, and for one stop string after the other, so a stop
that comes later in the run can win over an earlier one. Asked after each token, as a
server without speculation does, it finds the first. Where no text is looked for, upstream's own way is in the order of
the tokens, and quicker.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.managers.schedule_batch.Req.update_finish_state"


def finish_token_by_token(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Updates `req` as if the last `new_accepted_len` tokens of `output_ids` had come one by one.

    All of them stay in `output_ids`, since their KV is committed; `finished_len` says how many count.
    """
    if new_accepted_len == 1:
        original(req, 1)
        return
    params = req.sampling_params
    looks_for_text = params.stop_strs or params.stop_regex_strs
    if not looks_for_text or req.to_finish is not None or req.finished():
        original(req, new_accepted_len)
        return
    run = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    grammar = req.grammar  # it has seen the whole run, and ends with it if it has ended
    for count, token in enumerate(run, start=1):
        req.output_ids.append(token)
        req.grammar = grammar if count == len(run) else None
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            break
    req.grammar = grammar
    req.output_ids.extend(run[count:])


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, finish_token_by_token, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
