"""A set-up file of measured points (`measured`), from the journals of a real server.

The journals should hold gamma 0 and each other gamma at several batch sizes, such as of `random` or
`static:N` under some concurrencies. Step times are fitted by the planner's own estimator, so a cell
that was never seen is filled in from the others; a server too small to tell is refused.
"""

import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.base import Observation, Residency
from sglang_nightjar.policy.step_time import StepTime, tells_step_time
from sglang_nightjar.simulate.measured import Measured
from sglang_nightjar.simulate.replay import build, records_of

_PER_CELL = 64  # steps of one (batch size, gamma) that are looked at, so that common ones do not drown the rest
_PASSES = 4  # times they are learned, in random order
_LEAST_STEPS = 200
_LEAST_S = 1e-6
_MOST_PREFILLS = 400


def measure(paths: Sequence[Path], name: str) -> Measured:
    """The points of the server that wrote `paths`; `UserError` says what the journals lack.

    A prefill's cost is a line through the prefill steps the draft did not read, where there are any; a draft's
    token costs the mean of the catch-ups, or where there was none nothing; slots with and without the draft are the
    largest pools seen; reloading and relocating are not in a journal and come out as 0.
    """
    seen = [
        build(Observation, record)
        for path in paths
        for record in records_of(path, "--measure")
        if record.get("record") == "step"
    ]
    where = "--measure " + " ".join(map(str, paths))
    steps = [step for step in seen if tells_step_time(step)]
    sizes = {step.batch_size for step in steps}
    if len(steps) < _LEAST_STEPS or len(sizes) < 2 or all(step.gamma > 0 for step in steps):
        raise UserError(
            f"{where}: {len(steps)} decode steps at {len(sizes)} batch sizes; at least {_LEAST_STEPS} at two or more "
            "are needed, some of them at gamma 0: serve with --nightjar-policy random under several concurrencies"
        )
    prefills = [step for step in seen if step.batch_size == 0 and step.prefill_tokens > 0]
    if not prefills:
        raise UserError(f"{where}: no prefill step; record the server from its start")
    prefill_step_s, prefill_token_s = _line([step for step in prefills if step.gamma == 0] or prefills)
    max_gamma, largest = max(step.gamma for step in steps), max(sizes)
    step_time = _fit(steps, max_gamma)
    # Two far-off loads tell what a token in the KV cache costs: the estimate is linear in it.
    kv_token_s = max(step_time.predict(0, 1, 2_000_000) - step_time.predict(0, 1, 1_000_000), 0.0) / 1e6
    batches = tuple(sorted({1 << power for power in range(largest.bit_length())} | {largest}))
    caught = [step for step in seen if step.catchup_tokens > 0 and step.catchup_seconds > 0.0]
    tokens = sum(step.catchup_tokens for step in caught)
    resident = max((s.total_slots for s in seen if s.residency == Residency.RESIDENT), default=0)
    return Measured(
        name=name,
        source=f"journals {', '.join(path.name for path in paths)}: {len(steps)} decode steps",
        batches=batches,
        gammas=tuple(range(max_gamma + 1)),
        seconds=tuple(
            tuple(max(step_time.predict(gamma, batch, 0), _LEAST_S) for batch in batches)
            for gamma in range(max_gamma + 1)
        ),
        prefill_token_s=prefill_token_s,
        prefill_step_s=prefill_step_s,
        draft_token_s=sum(step.catchup_seconds for step in caught) / tokens if tokens else 0.0,
        slots_resident=max(resident, 1),
        slots_evicted=max(max(step.total_slots for step in seen), 1),
        kv_token_s=kv_token_s,
    )


def _line(prefills: Sequence[Observation]) -> tuple[float, float]:
    """Seconds of a prefill step, and of each token in it: the median slope of all pairs (Theil and Sen), which single
    slow steps do not move, and the median rest. Where all are of one length, or shorter ones took longer, only the
    second."""
    draw = random.Random(0)
    taken = draw.sample(list(prefills), min(len(prefills), _MOST_PREFILLS))
    slopes = [
        (a.seconds - b.seconds) / (a.prefill_tokens - b.prefill_tokens)
        for a, b in itertools.combinations(taken, 2)
        if a.prefill_tokens != b.prefill_tokens
    ]
    per_token = statistics.median(slopes) if slopes else 0.0
    rest = statistics.median(step.seconds - per_token * step.prefill_tokens for step in taken)
    if per_token <= 0.0 or rest < 0.0 or not slopes:
        return 0.0, statistics.median(step.seconds / step.prefill_tokens for step in taken)
    return rest, per_token


def _fit(steps: Sequence[Observation], max_gamma: int) -> StepTime:
    """The planner's estimator, taught in random order and every cell alike."""
    cells: dict[tuple[int, int], list[Observation]] = {}
    for step in steps:
        cells.setdefault((step.gamma, step.batch_size), []).append(step)
    draw = random.Random(0)
    taken = [step for own in cells.values() for step in draw.sample(own, min(len(own), _PER_CELL))]
    step_time = StepTime(max_gamma)
    for _ in range(_PASSES):
        draw.shuffle(taken)
        for step in taken:
            step_time.learn(step)
    return step_time
