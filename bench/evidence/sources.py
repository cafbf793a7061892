"""One piece of evidence as it is kept in docs/results/NAME.json: what was measured, where, and at which level."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_nightjar.errors import UserError

LEVELS = {
    "L1": "L1, simulated",
    "L2": "L2, emulated device, real scheduler",
    "L1 and L2": "L1 and L2, the simulator beside the emulated device",
    "L1 to L3": "L1 to L3, simulator and emulated device beside real models on a CPU",
    "L3": "L3, real models on a CPU",
    "L4": "L4, a GPU",
}
MOST_BYTES = 250_000
MACHINE = ("cpu", "cores", "commit", "date", "command")  # what each must say of itself


@dataclass(frozen=True, slots=True)
class Source:
    """Attributes:

    name: of the file, without `.json`.
    form: whose JSON it is, see `published.form_of`.
    level: a key of `LEVELS`.
    machine: at least `MACHINE`.
    data: the figures, in the benchmark's own form less what the tables do not need.
    """

    name: str
    form: str
    level: str
    machine: dict[str, Any]
    data: dict[str, Any]

    def caption(self) -> str:
        """One line: level, machine, date, commit, file."""
        about = self.machine
        where = f"{about['cpu']}, {about['cores']} cores"
        if "gpu" in about:
            where = f"{about['gpu']}, {where}"
        return f"{LEVELS[self.level]}; {where}; {about['date']}, commit {about['commit']} (`results/{self.name}.json`)."

    def about(self) -> str:
        """The same with the command."""
        return f"{self.caption()}\n\n```bash\n{self.machine['command']}\n```"


Read = Callable[[str], Source | None]


def reader(folder: Path) -> Read:
    """Reads sources by name from `folder`; None where there is no such file."""

    def read(name: str) -> Source | None:
        path = folder / f"{name}.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            return Source(name, found["form"], found["level"], found["machine"], found["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a file of bench/report.py: {type(error).__name__}: {error}") from None

    return read


def write_source(source: Source, folder: Path) -> Path:
    """Writes it; rows, which are many, take a line each. `UserError` where that is more than `MOST_BYTES`."""
    path = folder / f"{source.name}.json"
    content = {"form": source.form, "level": source.level, "machine": source.machine, "data": source.data}
    text = _lines(content, 3) + "\n"
    if len(text) > MOST_BYTES:
        raise UserError(f"{path} would take {len(text)} bytes, and {MOST_BYTES} is the limit: measure less at once")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _lines(value: Any, depth: int, indent: int = 0) -> str:
    """JSON whose containers are spread over lines down to `depth` and compact below."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_lines(item, depth - 1, indent + 1)}" for key, item in value.items()]
    else:
        items = [_lines(item, depth - 1, indent + 1) for item in value]
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return first + "\n" + ",\n".join(pad + item for item in items) + "\n" + " " * indent + last
