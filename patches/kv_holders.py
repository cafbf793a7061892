"""Seam: everything of SGLang's that holds KV slots while no step runs.

Running requests hold them in their rows of `req_to_token`; the radix tree holds them in its
nodes. The tree's Rust core gives out a node's slots by `get_component_device_value` as the tensor it
keeps, so writing to it changes the tree; it cannot list its nodes, so ours remembers those that
inserts and matches have met (a node is made by one of the two, and its handle never changes).
"""

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend, resolve_tree_core_backend

from sglang_nightjar.memory.relocate import CachedNode
from sglang_nightjar.platform.names import TREE_CORE

_TIDY_AT = 4096  # remembered nodes before those the tree has dropped are forgotten


class RecordingTreeCore(RustUnifiedTreeCore):
    """The Rust core, with a memory of its nodes.

    Attributes:
        known: handles of every node there is; some of them may be gone.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.known: set[int] = set()
        self._tidy_at = _TIDY_AT

    def begin_insert(self, params: Any) -> Any:
        return self._remember(super().begin_insert(params))

    def resume_insert(self) -> Any:
        return self._remember(super().resume_insert())

    def reset(self) -> None:
        super().reset()
        self.known = set()

    def match_prefix(self, params: Any) -> Any:
        found = super().match_prefix(params)
        self._know(found.last_device_node)
        return found

    def _remember(self, step: Any) -> Any:
        if step.result is not None:
            self._know(step.result.last_device_node)
        return step

    def _know(self, end: int) -> None:
        """A walk ended at `end`: it may have split a node above, and the upper half is new."""
        self.known.update(info.node_id for info in self.path(end))
        if len(self.known) > self._tidy_at:
            self.known = {node for node in self.known if self.path(node)}
            self._tidy_at = max(2 * len(self.known), _TIDY_AT)

    def path(self, node: int) -> tuple[Any, ...]:
        """Upstream's `TreePathNodeInfo` from the root's child down to `node`; empty where it is gone or the root."""
        try:
            (found,) = self.collect_path_info([node])
        except KeyError:
            return ()
        return tuple(found)


class SchedulerHolders:
    """`memory.relocate.Holders` of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._core = scheduler.tree_cache.tree_core
        assert isinstance(self._core, RecordingTreeCore), f"the radix tree's core is a {type(self._core).__name__}"

    def requests(self) -> list[Any]:
        """Every request that has KV: running, just prefilled, or in the middle of a chunked prefill."""
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch)
        found = [req for batch in batches if batch is not None for req in batch.reqs]
        if scheduler.chunked_req is not None:
            found.append(scheduler.chunked_req)
        return [
            req
            for req in {id(req): req for req in found}.values()
            if req.kv is not None and req.kv.req_pool_idx is not None and req.kv.kv_allocated_len > 0
        ]

    def rows(self) -> list[tuple[int, int]]:
        return [(req.kv.req_pool_idx, req.kv.kv_allocated_len) for req in self.requests()]

    def nodes(self) -> list[CachedNode]:
        unheld = self._core.walk_for_kv_canary(True, False).slot_indices
        unlocked = set(unheld.tolist())
        found: list[tuple[int, CachedNode]] = []
        for known in self._core.known:
            path = self._core.path(known)
            if not path or not path[-1].full_value_len:
                continue
            slots = self._core.get_component_device_value(known, ComponentType.FULL)
            locked = int(slots[0]) not in unlocked
            found.append((len(path), CachedNode(known, path[-1].parent_id, path[-1].num_children, slots, locked)))
        total = sum(len(node.slots) for _, node in found)
        expected = self._core.total_size()[0]
        assert total == expected, f"the radix tree holds {expected} slots; the nodes remembered have {total}"
        return [node for _, node in sorted(found, key=lambda item: (item[0], item[1].node))]

    def drop(self, node: int) -> None:
        tracker = dict.fromkeys(self._tree.tree_components, 0)
        self._tree._evict_device_leaf(node, tracker)

    def evict(self, slots: int) -> int:
        return int(self._tree.evict(EvictParams(num_tokens=slots)).num_tokens_evicted)

    def evictable(self) -> int:
        return int(self._tree.evictable_size())

    def prefilling(self) -> bool:
        return self._scheduler.chunked_req is not None


def install() -> None:
    """Registers the core under `TREE_CORE`."""

    def make(params: Any, components: Any) -> RustUnifiedTreeCore:
        if resolve_tree_core_backend("rust", params) != "rust":
            raise RuntimeError("elastic memory needs SGLang's Rust radix tree core; use --nightjar-elastic off")
        return RecordingTreeCore(params)

    register_tree_core_backend(TREE_CORE, make)
