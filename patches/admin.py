"""Seam: `/set_internal_state`, by which an operator moves the draft by hand; `/nightjar/...` are its short names.

`{"server_args": {"nightjar_draft": 0}}` evicts the draft, 1 reloads it. The request reaches every
rank in the lockstep broadcast; rank 0 begins the transition, or says that it cannot.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._update_handlers"
KEY = "nightjar_draft"
_TURNS = (Turn.EVICT, Turn.RELOAD)


def add_handler(original: Callable[..., dict[str, Any]], state_controller: Any) -> dict[str, Any]:
    """Around `_update_handlers`: adds ours."""
    return {**original(state_controller), KEY: _UpdateHandler(_validate, _apply)}


def _validate(key: str, value: Any) -> None:
    own = controller.current()
    if value not in (0, 1):
        raise UpdateRejected(f"{key} is 0 (evict) or 1 (reload), not {value}")
    reason = "this server does not speculate" if own is None else own.refusal(_TURNS[int(value)])
    if reason is not None:
        raise UpdateRejected(reason)


def _apply(key: str, value: Any) -> None:
    own = controller.current()
    assert own is not None, "validated"
    own.want(_TURNS[int(value)])


def add_routes() -> None:
    """Adds `POST /nightjar/evict` and `/nightjar/reload` to the HTTP server of this process."""
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def move(draft: int) -> JSONResponse:
        manager = http_server._global_state.tokenizer_manager
        begun = all(await manager.set_internal_state(SetInternalStateReq(server_args={KEY: draft})))
        text = "begun; /server_info shows how it goes" if begun else "refused; the server's log says why"
        return JSONResponse({"begun": begun, "message": text}, status_code=200 if begun else 409)

    async def evict() -> JSONResponse:
        return await move(0)

    async def reload() -> JSONResponse:
        return await move(1)

    for path, endpoint in (("/nightjar/evict", evict), ("/nightjar/reload", reload)):
        http_server.app.add_api_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint), methods=["POST"])


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, add_handler, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
