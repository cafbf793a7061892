"""Seam: `Scheduler.result_queue`, where the overlap loop keeps the outcome of the step under way.

Memory moves between two steps. Without overlap every iteration begins there. The overlapping loop is never there:
it launches a step, and only then processes the outcome of the one before. `finish_step` brings it there for once: the
outcome is processed now instead of after the next launch, which is the order of the loop without overlap, so what
follows sees what it would see there. One step's overlap is lost; moves are rare.

The loop goes on to take an entry out of its queue for the batch it launched last (so does a pause), so an entry of no
requests stays there, which `patches/outcome.py` passes over.
"""

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_nightjar import controller
from sglang_nightjar.patches.lockstep import scheduler_of_rank

PROCESSED = ScheduleBatch(reqs=[])  # in place of a batch whose outcome has been processed already


def finish_step() -> None:
    """At the beginning of an iteration: no step is under way from here to the next launch.

    On a GPU the device is idle then as well. Processing an outcome waits for the copy of its results, which SGLang
    puts behind all the work of the step (`Scheduler._copy_result_to_cpu`), the draft's included.
    """
    own, scheduler = controller.current(), scheduler_of_rank()
    assert own is not None, "only a server with a draft has memory to move"
    queue = scheduler.result_queue
    assert len(queue) <= 1, f"{len(queue)} outcomes are awaited at the beginning of an iteration"
    if queue and queue[0][0] is not PROCESSED:
        batch, result = queue[0]
        queue[0] = PROCESSED, result
        scheduler.process_batch_result(batch, result)
    assert own.flight.under_way == 0, f"{own.flight.under_way} steps are still under way"
