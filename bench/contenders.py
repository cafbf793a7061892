"""The servers of a benchmark, one per policy: started, stopped and let run in turns, and read."""

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import emulated
from journals import moves, series
from serving import Server, serve_all

from sglang_nightjar.emulate.set_up import find_emulated
from sglang_nightjar.observe.journal import read_journal

REAL_WORDS = ("--max-total-tokens", 16384)
# A token of each request that is streamed costs the processes that talk to clients more than it tells: the first one
# comes at once anyway, and times per token are those between the first and the last.
EMULATED_WORDS = ("--stream-interval", 16)
_BOOT_AT_ONCE = 2
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


class Reading(NamedTuple):
    """What a server says of itself: its state, and requests retracted (preempted) so far."""

    state: dict[str, Any]
    retracted: int


@dataclass(frozen=True)
class Contender:
    """One policy's server. `journal`: where it writes, if it has anything to decide."""

    policy: str
    server: Server
    journal: Path

    def read(self) -> Reading:
        return Reading(emulated.state(self.server), self.retracted())

    def retracted(self) -> int:
        """Requests so far that lost their KV slots and began again, from the log."""
        return sum(map(int, _RETRACTED.findall(self.server.log.read_text(errors="replace"))))

    def between(self, before: Reading, after: Reading) -> dict[str, Any]:
        """What happened in a load."""
        slots = after.state["memory_usage"]["token_capacity"]
        found: dict[str, Any] = {"preemptions": after.retracted - before.retracted, "kv_slots": slots}
        if "nightjar" not in after.state:
            return found
        old, new = before.state["nightjar"], after.state["nightjar"]
        steps = [b - a for a, b in zip(old["steps_by_gamma"], new["steps_by_gamma"], strict=True)]
        drafted = new["drafted"] - old["drafted"]
        found["accept_length"] = (new["committed"] - old["committed"]) / drafted if drafted else None
        found["steps_by_gamma"], found["switches"] = steps, new["switches"] - old["switches"]
        found["catchup_tokens"] = new["catchup_tokens"] - old["catchup_tokens"]
        if new["memory"] is not None:
            found["kv_slots_evicted"] = new["memory"]["slots_evicted"]
            for name in ("evictions", "reloads", "postponed", "moved_slots"):
                found[name] = new["memory"][name] - old["memory"][name]
        return found

    def whole_run(self, kept: Path | None) -> dict[str, Any]:
        """What is known over all loads; the journal is copied into the folder `kept`."""
        if kept and self.journal.exists():
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.journal, kept)
        records = read_journal(self.journal) if self.journal.exists() else []
        return {"retractions": self.retracted(), "timeline": series(records), "moves": moves(records)}


def words(policy: str, journal: Path, options: argparse.Namespace) -> list[Any]:
    """A server's command line."""
    name, *settings = policy.split("+")
    own: list[Any] = ["--nightjar-policy", name]
    if options.emulate:
        own += ["--nightjar-emulate", options.emulate, "--nightjar-emulate-speed", options.emulate_speed]
        own += EMULATED_WORDS
        if options.acceptance:
            own += ["--nightjar-emulate-acceptance", options.acceptance]
        if policy == "off":
            own += ["--max-total-tokens", find_emulated(options.emulate).slots(resident=True)]
    else:
        own += REAL_WORDS
    own += options.server_arguments
    for setting in settings:
        if setting == "no-draft":
            if name != "off" or not options.emulate:
                raise SystemExit(f"{policy}: no-draft goes with `off` on an emulated device")
            continue
        option, _, value = setting.partition(":")
        own += [f"--nightjar-{option}", value]
    if name != "off":
        own += ["--nightjar-journal", journal]
    return own


def start(policies: Sequence[str], stack: ExitStack, folder: Path, options: argparse.Namespace) -> list[Contender]:
    """A server for each policy, warmed up and stopped; `stack` ends them."""
    found: list[Contender] = []
    for first in range(0, len(policies), _BOOT_AT_ONCE):
        some = policies[first : first + _BOOT_AT_ONCE]
        lines = [words(policy, folder / policy, options) for policy in some]
        for policy, server in zip(some, stack.enter_context(serve_all(lines)), strict=True):
            stack.callback(os.killpg, server.process.pid, signal.SIGCONT)  # a stopped process cannot end itself
            server.generate("Warm up.", max_new_tokens=8)
            os.killpg(server.process.pid, signal.SIGSTOP)
            print(f"[bench] {policy} is up", file=sys.stderr, flush=True)
            found.append(Contender(policy, server, folder / policy))
    return found


@contextmanager
def running(contenders: Sequence[Contender]) -> Iterator[None]:
    """Lets stopped servers run, with their children, and stops them again."""
    for each in contenders:
        os.killpg(each.server.process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        for each in contenders:
            os.killpg(each.server.process.pid, signal.SIGSTOP)
