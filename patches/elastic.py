"""Seam: elastic memory under a scheduler: its allocator, its idle sleep, its models' weights and pools."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from sglang_nightjar import controller
from sglang_nightjar.config import inherited_config
from sglang_nightjar.demo.cache import cache_root
from sglang_nightjar.elastic import Elastic
from sglang_nightjar.emulate import device as emulated
from sglang_nightjar.emulate import memory as emulated_memory
from sglang_nightjar.memory.device import DeviceMemory, PosixDevice
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.elastic_allocator import ElasticTokenAllocator
from sglang_nightjar.memory.relocate import MoveCosts
from sglang_nightjar.memory.setup import build_residency, time_moving, weight_bytes
from sglang_nightjar.patches import kv_holders
from sglang_nightjar.patches.barrier import finish_step
from sglang_nightjar.patches.capacity import set_capacity
from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.patches.lockstep import scheduler_of_rank
from sglang_nightjar.platform.names import TREE_CORE, TREE_CORE_VARIABLE
from sglang_nightjar.policy.residency import ResidencyCosts, ResidencyPlanner, ResidencySettings

BUILD = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator"
SLEEP = "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle"

_NAP_S = 0.002  # between iterations of an idle server whose draft is moving
_STEP_S = 0.05  # a decode step, until reloads have been timed: one chunk is copied per step
_SETTLE_S = 5.0


def make_elastic(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the building of the allocator. Upstream asks the platform for a paged one, but not for page size 1."""
    made = original(*args, **kwargs)
    own = controller.current()
    if own is None or not own.elastic or type(made) is not TokenToKVPoolAllocator:
        return made
    return ElasticTokenAllocator(made.size, made.dtype, made.device, made.get_kvcache(), made.need_sort)


def stay_awake(original: Callable[..., Any], scheduler: Any) -> Any:
    """Around `maybe_sleep_on_idle`: while the draft is moving the loop goes on, as it would under load."""
    own = controller.current()
    if own is not None and own.moving:
        time.sleep(_NAP_S)
        return None
    return original(scheduler)


def make_store(target: Any, draft: Any) -> DraftStore:
    """Moves the loaded draft's weights onto an arena; before any pool is made. Arguments: model runners."""
    os.environ[TREE_CORE_VARIABLE] = TREE_CORE  # read when the tree is made, after the pools
    kind = DraftStore if emulated.current() is None else emulated_memory.EmulatedDraftStore
    store = kind(draft.model, _device_memory(draft), shared_with=target.model)
    own = controller.current()
    assert own is not None, "the controller is started before the store is made"
    config = draft.model_config
    heads = config.get_num_kv_heads(get_parallel().tp_size)
    own.draft_bytes = (
        store.nbytes,
        2 * config.num_hidden_layers * heads * config.head_dim * draft.kv_cache_dtype.itemsize,
    )
    return store


def _device_memory(runner: Any) -> DeviceMemory:
    """That the models of a model runner are on."""
    if runner.device == "cuda":
        from sglang_nightjar.platform.cuda import device_memory
        from sglang_nightjar.speculation.cuda_limits import check_movable

        check_movable(runner)
        return device_memory()
    folder = cache_root()
    folder.mkdir(parents=True, exist_ok=True)
    return PosixDevice(folder)


def attach(
    own: controller.Controller, target: Any, draft_worker: Any, store: DraftStore, workspace_bytes: int = 0
) -> None:
    """Gives the controller its memory, and rank 0's planner the decision about it; after the pools are made.

    `workspace_bytes`: of the device, held for good besides weights and KV.
    """
    config = inherited_config()
    assert config is not None and own.channel is not None, "elastic memory is a Nightjar server's"
    device_bytes, ranks = config.device_bytes(), get_parallel().tp_size
    device = emulated.current()
    chunk_bytes = config.reload_chunk_mb << 20 if device is None else emulated_memory.chunk_bytes(device, config)
    memory = build_residency(
        target=target,
        draft=draft_worker.draft_runner,
        store=store,
        capacity=None if device_bytes is None else device_bytes // ranks,
        chunk_bytes=chunk_bytes,
        target_bytes=weight_bytes(target.model) if device is not None or target.device == "cuda" else None,
        workspace_bytes=workspace_bytes,
        on_moved=None if device is None else partial(emulated_memory.charge_relocation, device),
        holders=lambda: kv_holders.SchedulerHolders(scheduler_of_rank()),
        on_capacity=lambda slots: set_capacity(scheduler_of_rank(), slots),
        on_draft_lost=draft_worker.state.clear_all,
        finish_step=finish_step,
        clock=own.clock,
    )
    move_s = time_moving(target.token_to_kv_pool) if device is None else device.cost.relocate_s(1)

    def keep_cached() -> bool:
        return MoveCosts(move_s, own.prefill_token_s).worth_moving(own.hits.value)

    settle_s = min(_SETTLE_S, config.cooldown_s)
    own.memory = Elastic(
        memory,
        own.channel,
        own.clock,
        idle_reload_s=settle_s,
        hold_s=config.cooldown_s,
        keep_cached=keep_cached,
        finish_step=finish_step,
    )
    if own.planner is None or not config.policy_spec().estimates:
        return
    chunks = -(-store.nbytes // chunk_bytes)
    own.planner.residency = ResidencyPlanner(
        own.planner.policy.model,  # type: ignore[attr-defined]  # such a policy has one
        ResidencyCosts(
            slots_resident=memory.sizes.small,
            slots_evicted=memory.sizes.large,
            pause_s=move_s * (memory.sizes.large - memory.sizes.small),
            reload_s=chunks * _STEP_S,
        ),
        ResidencySettings(
            tau_low=config.free_threshold,
            margin=min(config.free_threshold + 0.1, 0.9),
            persist=config.persist_steps,
            cooldown_s=config.cooldown_s,
            settle_s=settle_s,
        ),
    )


def install() -> None:
    """Wraps both, and registers the radix tree core that knows its nodes."""
    HookRegistry.register(BUILD, make_elastic, HookType.AROUND)
    HookRegistry.register(SLEEP, stay_awake, HookType.AROUND)
    kv_holders.install()


def verify() -> None:
    """Raises `RuntimeError` where a wrapper is not in place."""
    require_applied(BUILD, SLEEP)
