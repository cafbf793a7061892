"""Numbers as scenario files may hold them, and how a mistake in a file reaches the user."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from sglang_nightjar.errors import UserError

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]

T = TypeVar("T")


def read_bytes(path: Path, what: str) -> bytes:
    """The file's bytes; `UserError` says which `what` cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror or error}") from None


def decode_json(data: bytes, kind: type[T], source: str) -> T:
    """`data` as `kind`; `UserError` names the source, the field and what is wrong with it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        field = place.rstrip("`").removeprefix("$").removeprefix(".") or "(top level)"
        raise UserError(f"{source}: field {field}: {message}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{source} is not valid JSON: {error}") from None


def as_json(value: Any) -> bytes:
    """`value` as indented JSON; NaN becomes null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)
