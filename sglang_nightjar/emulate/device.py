"""The emulated device: a clock, and the time its work takes.

Work on the device takes what its set-up says (`forwards.py`), divided by the speed, counted from the moment it was
begun: the CPU time the emulation itself needs is inside. Everything the scheduler does between is real and comes on
top; nothing is charged for it (`Device.step_overhead_s` and `speculation_overhead_s`, which stand for it in the
simulator, are not). At a speed below 1 the device is slower, and the scheduler's own time weighs so much less.
"""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_nightjar.config import inherited_config
from sglang_nightjar.emulate.agreement import Agreement, read_acceptance
from sglang_nightjar.emulate.forwards import Forwards, RooflineForwards
from sglang_nightjar.emulate.set_up import find_emulated
from sglang_nightjar.simulate.roofline import SetUp, StepCost

_SPIN_S = 0.4e-3  # before a deadline: sleeping is not more exact than that
_LINK_CHUNK_S = 0.01  # of the link between host and device: what is copied between two steps


class Work(Enum):
    """What the device does."""

    TARGET = "target"
    DRAFT = "draft"
    RELOCATE = "relocate"
    RELOAD = "reload"
    EVICT = "evict"


@dataclass(slots=True)
class Account:
    """Of one kind of work: how often, emulated seconds, and wall seconds by which it ended late because
    the emulation itself took longer."""

    count: int = 0
    seconds: float = 0.0
    late_seconds: float = 0.0


class EmulatedDevice:
    """One set-up's device, all its GPUs together.

    Attributes:
        set_up, agreement: as given.
        speed: emulated seconds per second.
        forwards, cost: what forwards take, and everything else.
    """

    def __init__(
        self,
        set_up: SetUp,
        speed: float,
        agreement: Agreement,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        forwards: Forwards | None = None,
    ) -> None:
        """`forwards`: None for the roofline's."""
        self.set_up, self.agreement, self.speed = set_up, agreement, speed
        self.forwards = forwards or RooflineForwards(StepCost(set_up))
        self.cost = self.forwards.cost
        self.clock, self._sleep = clock, sleep
        self._origin_s: float | None = None
        self._accounts = {work: Account() for work in Work}
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Emulated seconds since the first forward began; 0 before it."""
        return 0.0 if self._origin_s is None else (self.clock() - self._origin_s) * self.speed

    def finish(self, work: Work, began: float, seconds: float) -> None:
        """Returns when work begun at `began` (a reading of `clock`) that takes `seconds` on the device is over."""
        deadline = began + seconds / self.speed
        late = self.clock() - deadline
        with self._lock:
            account = self._accounts[work]
            account.count += 1
            account.seconds += seconds
            account.late_seconds += max(late, 0.0)
        if -late > _SPIN_S:
            self._sleep(-late - _SPIN_S)
        while self.clock() < deadline:
            pass

    def target_forward(self, began: float, tokens: int, kv_tokens: int, requests: int, *, prompts: bool) -> None:
        """`finish` of a forward of the target; `kv_tokens`: of context in the batch, `tokens` included."""
        seconds = self.forwards.target_s(tokens, kv_tokens, requests, prompts=prompts)
        self._forward(Work.TARGET, began, seconds)

    def draft_forward(self, began: float, tokens: int, kv_tokens: int, requests: int) -> None:
        """The same of the draft."""
        self._forward(Work.DRAFT, began, self.forwards.draft_s(tokens, kv_tokens, requests))

    def _forward(self, work: Work, began: float, seconds: float) -> None:
        if self._origin_s is None:
            self._origin_s = began
        self.finish(work, began, seconds)

    def background(self, work: Work, seconds: float) -> None:
        """Waits, in a thread of its own, until such work that begins now is over; takes no CPU from the others."""
        with self._lock:
            account = self._accounts[work]
            account.count += 1
            account.seconds += seconds
        self._sleep(seconds / self.speed)

    def link_chunk_bytes(self) -> int:
        """Real bytes that cross the link in the time that one chunk of a reload may take."""
        return int(self.set_up.device.link_bytes_s * self.set_up.tp * _LINK_CHUNK_S)

    def report(self) -> dict[str, Any]:
        """For `/server_info`."""
        return {
            "set_up": self.set_up.name,
            "speed": self.speed,
            "now_s": self.now_s(),
            "work": {
                work.value: {
                    "count": account.count,
                    "seconds": account.seconds,
                    "late_seconds": account.late_seconds,
                }
                for work, account in self._accounts.items()
            },
        }


@functools.cache
def current() -> EmulatedDevice | None:
    """The device of this process; None in one whose server emulates none."""
    config = inherited_config()
    if config is None or not config.emulate:
        return None
    agreement, found = Agreement(read_acceptance(config.emulate_acceptance)), find_emulated(config.emulate)
    return EmulatedDevice(found.set_up, config.emulate_speed, agreement, forwards=found.forwards)


def require_current() -> EmulatedDevice:
    """The same, where there must be one."""
    device = current()
    assert device is not None, "an emulated model runs in a server started with --nightjar-emulate only"
    return device
