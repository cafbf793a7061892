"""Test support: the launch command with a meter in its scheduler: whose code an iteration's time goes to.

    METER_FOLDER=/tmp/rows python -m metered_launch --port 30000 --nightjar-emulate 4090-r1-qwen-7b ...

Owners are Nightjar's hooks (one each), its worker, what these call that is worth a line of its own, the emulated
device (its arithmetic and its waiting) and the rest, which is SGLang's. `METER_FOLDER/PORT.rows` gets one row per
scheduler iteration, `METER_FOLDER/PORT.json` says what is in it (`Layout`). Installed before the server's processes
are forked.
"""

import functools
import inspect
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from meter import Meter, call_cost

from sglang_nightjar import launch_server, patches
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.platform.threads import set_thread_environment

CAPACITY = 1 << 16  # rows; the first holds their number
FACTS = ("batch_size", "prefill", "gamma", "cpu_ns")
DEVICE, SGLANG, METER = "device", "rest", "meter"

# Nightjar's own, besides its hooks. Dotted names.
OWN = {
    "sglang_nightjar.policy.planner.Planner.decide": "planner.decide",
    "sglang_nightjar.policy.planner.Planner.observe": "planner.observe",
    "sglang_nightjar.observe.journal.Journal.write": "journal",
    "sglang_nightjar.speculation.draft_state.DraftState.draft_lens": "draft_lens",
    "sglang_nightjar.speculation.chain_draft.ChainDraftWorker.draft_chain": "draft_chain",
    "sglang_nightjar.speculation.worker.NightjarStandaloneWorker.forward_batch_generation": "worker",
}
# What a server without Nightjar runs as well, called from ours.
UPSTREAM = (
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "sglang.srt.layers.sampler.Sampler.forward",
    "sglang_nightjar.speculation.worker.eagle_prepare_for_verify",
)
EMULATED = (
    "sglang_nightjar.emulate.model.EmulatedForCausalLM.forward",
    "sglang_nightjar.emulate.draft.EmulatedDraft.__call__",
)


class Layout(msgspec.Struct, frozen=True):
    """A row: `FACTS`, then of every owner `spent` ns, `entered` and `made` calls, all three since the start.

    `cpu_ns`: of the thread since the start, the device's and the meter's own left out. Batch, prefill and gamma are of
    the iteration that the row ends; 0 requests: none ran. `inside_ns`, `outside_ns`: of `CallCost`.
    """

    owners: list[str]
    inside_ns: float
    outside_ns: float

    @property
    def columns(self) -> int:
        return len(FACTS) + 3 * len(self.owners)


class Recorder:
    """Writes a row at the begin of every iteration of the scheduler."""

    def __init__(self, meter: Meter, path: Path) -> None:
        """`path`: without its suffix."""
        self._meter, self._path = meter, path
        self._rows: Any = None
        self._count = 0
        self._ran = (0, 0)  # requests, and whether it was a prefill
        self._left_out_ns = 0  # CPU

    def ran(self, batch: Any) -> None:
        """The iteration runs `batch`."""
        self._ran = len(batch.reqs), int(batch.forward_mode.is_extend())

    def off_the_record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its CPU time in no row."""

        def unrecorded(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._left_out_ns += time.thread_time_ns() - began

        return unrecorded

    def write(self) -> None:
        """Ends the row."""
        from sglang_nightjar import controller

        if self._rows is None:
            self._open()
        if self._count + 1 == CAPACITY:
            return
        own = controller.current()
        now = time.thread_time_ns()
        gamma = 0 if own is None else own.gamma
        meter = self._meter
        self._count += 1
        self._rows[self._count] = [
            *self._ran, gamma, now - self._left_out_ns, *meter.spent, *meter.entered, *meter.made
        ]  # fmt: skip
        self._rows[0, 0] = self._count
        self._ran = 0, 0
        self._left_out_ns += time.thread_time_ns() - now

    def _open(self) -> None:
        import numpy as np  # not before there are limits to its threads: with more than one, nothing is forked

        cost = call_cost()
        layout = Layout(self._meter.names, cost.inside, cost.outside)
        self._path.with_suffix(".json").write_bytes(msgspec.json.encode(layout))
        shape = CAPACITY, layout.columns
        self._rows = np.memmap(self._path.with_suffix(".rows"), np.int64, "w+", shape=shape)
        self._meter.settle()


def install_on_hooks(meter: Meter) -> None:
    """Meters every hook of Nightjar's that goes around a function of SGLang's; to be called before they are applied.
    One that stands in for a function (of a GPU) is none of Nightjar's costs."""
    from sglang.srt.plugins import hook_registry

    wrap = hook_registry._wrap_fn

    def metered_wrap(original: Callable[..., Any], hook: Callable[..., Any], kind: Any) -> Callable[..., Any]:
        module = (hook.__module__ or "").removeprefix("sglang_nightjar.patches.")
        if module == hook.__module__ or kind is not hook_registry.HookType.AROUND:
            return wrap(original, hook, kind)
        return meter.timed(wrap(meter.timed(original, SGLANG), hook, kind), f"{module}.{hook.__name__}")

    hook_registry._wrap_fn = metered_wrap


def install_on_classes(meter: Meter, recorder: Recorder) -> None:
    """The rest; after the hooks have been applied."""
    from sglang.srt.managers.scheduler import Scheduler

    for name, owner in OWN.items():
        replace(name, lambda function, owner=owner: meter.timed(function, owner))
    for name in UPSTREAM:
        replace(name, lambda function: meter.timed(function, SGLANG))
    for name in EMULATED:
        replace(name, lambda function: meter.timed(recorder.off_the_record(function), DEVICE))
    ingest, run, write = Scheduler.ingest_requests, Scheduler.run_batch, meter.timed(recorder.write, METER)

    @functools.wraps(ingest)
    def recorded_ingest(self: Any, *args: Any, **kwargs: Any) -> Any:
        write()
        return ingest(self, *args, **kwargs)

    @functools.wraps(run)
    def noted_run(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.ran(batch)
        return run(self, batch, *args, **kwargs)

    Scheduler.ingest_requests, Scheduler.run_batch = recorded_ingest, noted_run


def replace(name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `by(function)` in place of the function, method or class method of that dotted name."""
    place, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(place)
    found = inspect.getattr_static(owner, attribute)
    is_class_method = isinstance(found, classmethod)
    made = by(found.__func__ if is_class_method else found)
    setattr(owner, attribute, classmethod(made) if is_class_method else made)


def main() -> int:
    set_thread_environment(NightjarConfig(), ranks=2)  # as the launcher does, before torch is imported
    meter = Meter()
    recorder = Recorder(meter, Path(os.environ["METER_FOLDER"]) / sys.argv[sys.argv.index("--port") + 1])
    install, serve = patches.install, launch_server._serve

    def metered_install(config: NightjarConfig) -> None:
        install_on_hooks(meter)
        install(config)

    def metered_serve(server_args: Any) -> int:
        install_on_classes(meter, recorder)
        return serve(server_args)

    patches.install, launch_server._serve = metered_install, metered_serve
    return launch_server.main()


if __name__ == "__main__":
    sys.exit(main())
