"""The lines of the contract: their grammar (described in `contract.py`), and comparing one with SGLang's source."""

import re

import msgspec

from sglang_nightjar.patches.source_scan import Definition

_LINE = re.compile(r"(?P<name>[\w.]+)(?:\((?P<parameters>[^)]*)\)|\{(?P<members>[^}]*)\})?$")


class Entry(msgspec.Struct, frozen=True):
    """One line of the contract. `parameters` None: not checked; `open_ended`: more are allowed."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    open_ended: bool = False
    members: tuple[str, ...] = ()

    def drift(self, definitions: dict[str, Definition]) -> str | None:
        """What is different upstream, or None."""
        owner, _, method = self.name.partition(".")
        found = definitions.get(owner)
        if found is not None and method:
            found = (found.members or {}).get(method)
        full_name = f"sglang.{self.module}.{self.name}"
        if found is None:
            return f"{full_name} is gone"
        missing = [member for member in self.members if member not in (found.members or {})]
        if missing:
            return f"{full_name} has no {', '.join(missing)}"
        if self.parameters is None:
            return None
        present = found.parameters or ()
        if self.open_ended:
            missing = [name for name in self.parameters if name not in present]
            return f"{full_name} has no parameter {', '.join(missing)}" if missing else None
        if present != self.parameters:
            return f"{full_name} takes ({', '.join(present)}), not ({', '.join(self.parameters)})"
        return None


def parse(text: str) -> list[Entry]:
    """Lines as the contract's, parsed."""
    parsed: list[Entry] = []
    module = ""
    for line in filter(str.strip, text.splitlines()):
        if not line.startswith(" "):
            module = line
            continue
        match = _LINE.match(line.strip())
        assert match is not None, f"malformed contract line: {line}"
        parameters, members = match["parameters"], match["members"]
        names = _names(parameters or "")
        parsed.append(
            Entry(
                module=module,
                name=match["name"],
                parameters=None if parameters is None else tuple(name for name in names if name != "..."),
                open_ended="..." in names,
                members=_names(members or ""),
            )
        )
    return parsed


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
