"""Committed tokens that the scheduler has not appended to their requests yet.

With overlap scheduling a step runs before the outcome of the one before it is processed, so `Req.output_ids` lacks what
that one committed. But the draft must read those tokens, and penalties count them. The worker, which
committed them, keeps them for one step: the scheduler has processed every outcome but the last by then.

They are kept on the host, as the CPU platform has them there anyway. On a GPU, reading them would wait for the
step that makes them: there they have to stay on the device, by slot, and be gathered there.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

NONE_LATE: Mapping[str, Sequence[int]] = MappingProxyType({})


class LateTokens:
    """What the last step committed, by request id."""

    def __init__(self) -> None:
        self._last: dict[str, list[int]] = {}

    def remember(self, reqs: Sequence[Any], runs: Sequence[list[int]]) -> None:
        """`runs[i]`: what the step just made committed for `reqs[i]`, in order."""
        self._last = {req.rid: run for req, run in zip(reqs, runs, strict=True)}

    def of(self, reqs: Sequence[Any], lengths: Sequence[int]) -> dict[str, list[int]]:
        """What `output_ids` lacks, by request id; requests that lack nothing are left out.

        Args:
            lengths: committed tokens of each request, prompt and bonus token included.
        """
        late = {}
        for req, length in zip(reqs, lengths, strict=True):
            missing = length - len(req.origin_input_ids) - len(req.output_ids)
            if missing > 0:
                run = self._last.get(req.rid, [])
                assert len(run) == missing, (
                    f"request {req.rid}: {length} tokens committed, {missing} not appended, {len(run)} kept"
                )
                late[req.rid] = run
        return late


def output_tokens(
    req: Any, late: Mapping[str, Sequence[int]], start: int = 0, stop: int | None = None
) -> Sequence[int]:
    """Output tokens of `req` from `start` up to `stop` (exclusive; None: to the last): appended ones, then late."""
    appended: Sequence[int] = req.output_ids[start:stop]
    run = late.get(req.rid)
    if run is None:
        return appended
    known = len(req.output_ids)
    return [*appended, *run[max(start - known, 0) : None if stop is None else max(stop - known, 0)]]
