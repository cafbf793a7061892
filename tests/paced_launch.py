"""Test support: the launch command with decode steps whose time tells their gamma.

    PACE_S=0.01 python -m paced_launch ...

Each drafted token makes a step `PACE_S` seconds longer, on every rank. The patch is made before the server's processes
are forked, so all of them have it.
"""

import os
import sys
import time
from typing import Any

from sglang_nightjar import launch_server
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.platform.threads import set_thread_environment

PACE_S = float(os.environ["PACE_S"])


def install() -> None:
    set_thread_environment(NightjarConfig(), ranks=2)  # as the launcher does, before torch is imported
    from sglang_nightjar.controller import Controller

    launched = Controller.launched

    def paced(self: Controller, number: int, facts: StepFacts | None, **moments: Any) -> None:
        if facts is not None:
            time.sleep(PACE_S * facts.gamma)  # still in the worker's call, as if drafting took longer
        launched(self, number, facts, **moments)

    Controller.launched = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(launch_server.main())
