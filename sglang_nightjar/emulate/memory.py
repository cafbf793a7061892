"""What moving the draft costs on the emulated device."""

from collections.abc import Callable

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.emulate.device import EmulatedDevice, Work, require_current
from sglang_nightjar.emulate.scale import SCALE
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.simulate.protocols import ServerOptions


class EmulatedDraftStore(DraftStore):
    """Weights cross the link in the time their real bytes take; in the background, as the store always works."""

    def release(self) -> None:
        super().release()
        require_current().background(Work.EVICT, ServerOptions().evict_s)

    def reload(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> None:
        device = require_current()
        each_s = device.cost.reload_s() / -(-self._size // chunk_bytes)

        def carried() -> None:
            before_chunk()
            device.background(Work.RELOAD, each_s)

        super().reload(chunk_bytes, carried)


def chunk_bytes(device: EmulatedDevice, config: NightjarConfig) -> int:
    """Emulated bytes of weights copied between two steps: what the option says, or 10 ms of the link if more."""
    return max(device.link_chunk_bytes(), config.reload_chunk_mb << 20) // SCALE


def charge_relocation(device: EmulatedDevice, slots: int, began: float) -> None:
    """Waits until moving `slots` KV slots, begun at `began`, is over on the device."""
    if slots:
        device.finish(Work.RELOCATE, began, device.cost.relocate_s(slots))
