"""Test support: the launch command with faults that a file switches on and off while it serves.

    FAULT_FILE=/tmp/fault python -m faulty_launch ...

The file holds one of: `commit:evict`, `commit:reload` (no memory for that thread), `thread` (the reload
thread dies), `mirror` (it does not hold what was written), `refuse` (every rank but 0 refuses), `silent`
(every rank but 0 stops reading), or nothing. The patches are made before the server's processes are forked, so all
of them have them.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from sglang_nightjar import launch_server
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.platform.threads import set_thread_environment

FAULT = Path(os.environ["FAULT_FILE"])


def armed() -> str:
    return FAULT.read_text().strip()


def install() -> None:
    set_thread_environment(NightjarConfig(), ranks=2)  # as the launcher does, before torch is imported
    from sglang_nightjar.coordination.agent import Agent
    from sglang_nightjar.memory.arena import CommitError
    from sglang_nightjar.memory.arena_posix import PosixArena
    from sglang_nightjar.memory.draft_store import DraftStore

    commit, reload, poll, answer = PosixArena.commit, DraftStore.reload, Agent.poll, Agent._answer

    def faulty_commit(self: PosixArena, start: int, stop: int) -> None:
        if armed() == "commit:" + threading.current_thread().name.removeprefix("nightjar-"):
            raise CommitError("injected: no memory")
        commit(self, start, stop)

    def faulty_reload(self: DraftStore, *words: Any) -> None:
        if armed() == "thread":
            raise ZeroDivisionError("injected: the thread dies")
        checksum = self.checksum
        if armed() == "mirror":
            self.checksum = "another"
        try:
            reload(self, *words)
        finally:
            self.checksum = checksum

    def faulty_poll(self: Agent) -> None:
        if armed() != "silent":
            poll(self)

    def faulty_answer(self: Agent, asked: Any) -> None:
        can = self._can
        if armed() == "refuse":
            self._can = lambda asked: "injected: not now"
        answer(self, asked)
        self._can = can

    PosixArena.commit = faulty_commit  # type: ignore[method-assign]
    DraftStore.reload = faulty_reload  # type: ignore[method-assign]
    Agent.poll = faulty_poll  # type: ignore[method-assign]
    Agent._answer = faulty_answer  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(launch_server.main())
