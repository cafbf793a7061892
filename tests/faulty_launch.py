"""Test support: the launch command with faults that a file switches on and off while it serves.

    FAULT_FILE=/tmp/fault python -m faulty_launch ...

The file holds words with commas between them, or nothing. A word counts for as long as it is there, on every rank,
or, where `@1` follows, on every rank but 0.

    commit:evict, commit:reload      no memory for that thread
    decommit:evict, decommit:reload  no memory can be taken away by that thread
    hold:evict, hold:reload          that thread waits before it takes memory
    thread                           the reload thread dies
    mirror                           it does not hold what was written
    full                             what is alive never fits the small pool (to be taken back only once nobody reloads,
                                     since ranks that read it at different steps would part)
    refuse@1, silent@1, mute@1       that rank refuses, stops reading, does not say that its work has ended
    impatient                        work may take 5 s, not 120

The patches are made before the server's processes are forked, so all of them have them.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sglang_nightjar import launch_server
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.platform.threads import set_thread_environment

FAULT = Path(os.environ["FAULT_FILE"])


def armed(fault: str) -> bool:
    words = FAULT.read_text().split(",")
    return fault in words or (f"{fault}@1" in words and _rank() != 0)


def _rank() -> int:
    from sglang_nightjar.controller import current

    own = current()
    assert own is not None, "faults are of ranks that serve"
    return 0 if own.planner is not None else 1


def install() -> None:
    set_thread_environment(NightjarConfig(), ranks=2)  # as the launcher does, before torch is imported
    from sglang_nightjar.coordination.agent import Agent
    from sglang_nightjar.coordination.coordinator import Coordinator
    from sglang_nightjar.coordination.messages import Done
    from sglang_nightjar.memory.arena import CommitError
    from sglang_nightjar.memory.arena_posix import PosixArena
    from sglang_nightjar.memory.draft_store import DraftStore
    from sglang_nightjar.memory.residency import DraftResidency

    commit, decommit, reload, drain = PosixArena.commit, PosixArena.decommit, DraftStore.reload, DraftResidency._drain
    poll, answer, send, watch = Agent.poll, Agent._answer, Agent._send, Coordinator.poll

    def thread() -> str:
        """Whose memory moves: `evict` or `reload`; while a server starts, another."""
        return threading.current_thread().name.removeprefix("nightjar-")

    def faulty_commit(self: PosixArena, start: int, stop: int) -> None:
        if thread() in ("evict", "reload"):
            while armed(f"hold:{thread()}"):
                time.sleep(0.02)
            if armed(f"commit:{thread()}"):
                raise CommitError("injected: no memory")
        commit(self, start, stop)

    def faulty_decommit(self: PosixArena, start: int, stop: int) -> None:
        if thread() in ("evict", "reload") and armed(f"decommit:{thread()}"):
            raise CommitError("injected: not given back")
        decommit(self, start, stop)

    def faulty_reload(self: DraftStore, *words: Any) -> None:
        if armed("thread"):
            raise ZeroDivisionError("injected: the thread dies")
        checksum = self.checksum
        if armed("mirror"):
            self.checksum = "another"
        try:
            reload(self, *words)
        finally:
            self.checksum = checksum

    def faulty_drain(self: DraftResidency) -> None:
        if armed("full"):
            self.counters.postponed += 1
        else:
            drain(self)

    def faulty_poll(self: Agent) -> None:
        if not armed("silent"):
            poll(self)

    def faulty_answer(self: Agent, asked: Any) -> None:
        can = self._can
        if armed("refuse"):
            self._can = lambda asked: "injected: not now"
        answer(self, asked)
        self._can = can

    def faulty_send(self: Agent, message: Any) -> None:
        if not (isinstance(message, Done) and armed("mute")):
            send(self, message)

    def faulty_watch(self: Coordinator) -> None:
        self._work_timeout_s = 5.0 if armed("impatient") else 120.0
        watch(self)

    PosixArena.commit = faulty_commit  # type: ignore[method-assign]
    PosixArena.decommit = faulty_decommit  # type: ignore[method-assign]
    DraftStore.reload = faulty_reload  # type: ignore[method-assign]
    DraftResidency._drain = faulty_drain  # type: ignore[method-assign]
    Agent.poll = faulty_poll  # type: ignore[method-assign]
    Agent._answer = faulty_answer  # type: ignore[method-assign]
    Agent._send = faulty_send  # type: ignore[method-assign]
    Coordinator.poll = faulty_watch  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(launch_server.main())
