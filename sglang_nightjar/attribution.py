"""Which step an outcome belongs to, and how long that step took.

SGLang's overlap scheduler launches a step before it has processed the outcome of the one before:

    decide 2, launch 2, outcome 1, decide 3, launch 3, outcome 2, ...

When an outcome arrives, the directive in force and the worker's latest work are another step's. So what a
step was launched with is written down at its launch, under the number SGLang gives every forward, and
its outcome takes it out under the same number. Without overlap the same holds, with nothing in between.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from sglang_nightjar.observe.counters import StepFacts


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose outcome has not arrived.

    Attributes:
        number: SGLang's `ScheduleBatch.forward_iter`.
        directive: number of the directive it was launched under.
        gamma: of that directive, and 0 for a prefill that the draft did not read. A decode step's own is in `facts`: 0
            where every request opted out.
        facts: what the worker did; None for a prefill.
        draft_forwards: of the worker so far, those of this step included.
        mark: of the `StepClock`.
    """

    number: int
    directive: int
    gamma: int
    facts: StepFacts | None
    draft_forwards: int
    mark: float


class StepClock(Protocol):
    """How long steps take, in s, told from when the scheduler launches them and processes their outcomes.

    It never waits for the device. Moments are monotonic, in s, and come in the order of the calls.
    """

    def launched(self, began_s: float, ended_s: float, *, after_idle: bool) -> float:
        """A launch went on from `began_s` to `ended_s`; `after_idle`: nothing was under way before it.

        Returns:
            What `landed` needs to know of the step: its mark.
        """
        ...

    def landed(self, mark: float, began_s: float, ended_s: float) -> float:
        """The outcome of the step of that `mark` was processed from `began_s` to `ended_s`; returns its time."""
        ...


class SynchronousClock:
    """For a device that is done with a step when its launch returns: the CPU.

    A step is charged the scheduling before its launch, its launch, and the processing of its own outcome, wherever
    another step's launch lies in between. Between two idle times every moment is charged exactly once.
    """

    def __init__(self) -> None:
        self._until_s: float | None = None  # all before it is charged, except `_spare_s`
        self._spare_s = 0.0  # passed before an outcome was processed: charged to the launch that follows

    def launched(self, began_s: float, ended_s: float, *, after_idle: bool) -> float:
        if after_idle or self._until_s is None:
            self._until_s, self._spare_s = began_s, 0.0
        seconds = self._spare_s + ended_s - self._until_s
        self._until_s, self._spare_s = ended_s, 0.0
        return seconds

    def landed(self, mark: float, began_s: float, ended_s: float) -> float:
        assert self._until_s is not None, "an outcome follows a launch"
        self._spare_s += began_s - self._until_s
        self._until_s = ended_s
        return mark + ended_s - began_s


class ArrivalClock:
    """For a device that works on while the launch has returned: a GPU.

    SGLang's processing of an outcome begins by waiting for that step's results, so outcomes arrive as fast as the
    slower of device and scheduler makes steps, and a step took the time since the outcome before it.
    """

    def __init__(self) -> None:
        self._arrived_s = float("-inf")

    def launched(self, began_s: float, ended_s: float, *, after_idle: bool) -> float:
        return began_s if after_idle or self._arrived_s == float("-inf") else float("-inf")

    def landed(self, mark: float, began_s: float, ended_s: float) -> float:
        seconds = ended_s - max(mark, self._arrived_s)
        self._arrived_s = ended_s
        return seconds


class InFlight:
    """The steps launched and not landed: at most one while another is scheduled, two within an iteration."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._steps: deque[Launched] = deque()

    def launch(
        self,
        number: int,
        *,
        directive: int,
        gamma: int,
        facts: StepFacts | None,
        draft_forwards: int,
        began_s: float,
        ended_s: float,
        after_idle: bool,
    ) -> None:
        """Step `number` has been launched; arguments as in `Launched` and `StepClock.launched`."""
        mark = self._clock.launched(began_s, ended_s, after_idle=after_idle)
        self._steps.append(Launched(number, directive, gamma, facts, draft_forwards, mark))

    def awaited(self, number: int) -> Launched:
        """Step `number`, whose outcome is about to be processed: they come in the order of the launches, as SGLang's
        queue is one."""
        assert self._steps, f"the outcome of step {number} has arrived, and none is awaited"
        step = self._steps[0]
        assert step.number == number, f"the outcome of step {number} has arrived, and that of {step.number} is awaited"
        return step

    def land(self, number: int, began_s: float, ended_s: float) -> tuple[Launched, float]:
        """Takes out step `number`, whose outcome was processed from `began_s` to `ended_s`.

        Returns:
            The step, and how long it took.
        """
        step = self.awaited(number)
        self._steps.popleft()
        return step, self._clock.landed(step.mark, began_s, ended_s)

    @property
    def under_way(self) -> int:
        """How many there are."""
        return len(self._steps)

    @property
    def uncounted(self) -> int:
        """Most tokens a request may have committed in steps that have not landed: `kv_committed_len` lacks them."""
        return sum(step.facts.gamma + 1 for step in self._steps if step.facts is not None)
