"""Pictures of the evidence, docs/plots/NAME.png, and which figures each was drawn from.

Drawing needs matplotlib, which neither serving nor testing does: docs/plots/drawn.json has a digest of the figures
behind every picture, and a picture of other figures than those now in docs/results is not shown.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import serving_report
import timeline

from evidence.sources import LEVELS, Source
from evidence.suites import paper_rows, scenario_results
from sglang_nightjar.simulate import plots

_DRAWN = "drawn.json"


def _timelines(source: Source, path: Path) -> None:
    plots.plot_timelines([result for result in scenario_results(source.data) if result.timeline], str(path))


def _course(source: Source, policy: str, path: Path) -> None:
    known = source.data["servers"][policy]
    timeline.draw(known["timeline"], known["moves"], path, f"{policy} ({LEVELS[source.level]})")


# Form -> what the picture shows, and who draws it.
PICTURES: dict[str, tuple[str, Callable[[Source, Path], None]]] = {
    "paper": (
        "Throughput against off by clients",
        lambda source, path: plots.plot_closed(paper_rows(source.data, "closed"), str(path)),
    ),
    "regret": ("Regret over decisions", lambda source, path: plots.plot_regret(source.data["summary"], str(path))),
    "scenario": ("Throughput, requests, gamma, free KV and residency over time", _timelines),
    "serving": ("Throughput by load", lambda source, path: serving_report.plot(source.data, path)),
}


@dataclass(frozen=True)
class Picture:
    """Of a piece of evidence or, with `policy`, of one server of `bench/serving.py` over time."""

    source: Source
    policy: str | None = None

    @property
    def name(self) -> str:
        """Of its file, without `.png`."""
        return "-".join([self.source.name, *re.findall(r"[\w.]+", self.policy or "")])

    @property
    def shows(self) -> str:
        if self.policy is None:
            return PICTURES[self.source.form][0]
        return f"{self.policy}: arrivals, throughput, requests, gamma, KV slots and the draft over time"

    def lacks(self) -> str | None:
        """Why there can be no such picture."""
        if self.source.form not in PICTURES:
            return f"there is no picture of a {self.source.form} file, which {self.source.name}.json is"
        if self.policy is None:
            return None
        servers = self.source.data.get("servers", {})
        if self.policy not in servers:
            return f"{self.source.name}.json has no server {self.policy}"
        if not isinstance(servers[self.policy]["timeline"], dict) or not servers[self.policy]["timeline"]:
            return f"{self.source.name}.json kept no course of {self.policy} over time"
        return None

    def current(self, folder: Path) -> bool:
        """Whether it is there and shows these figures."""
        return drawn(folder).get(self.name) == digest(self.source) and (folder / f"{self.name}.png").exists()

    def shown(self, folder: Path) -> str:
        """A link to it, or why there is none."""
        if lack := self.lacks():
            return f"No picture: {lack}."
        if not self.current(folder):
            return "No picture of these figures yet: `scripts/python bench/report.py --plots` draws it."
        return f"![{self.shows}](plots/{self.name}.png)\n\n{self.source.caption()}"

    def draw(self, folder: Path) -> bool:
        """Draws it, unless the one that is there shows these figures; whether it was drawn.

        Raises:
            UserError: matplotlib is missing.
        """
        if self.lacks() or self.current(folder):
            return False
        plots.drawing()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.png"
        if self.policy is None:
            PICTURES[self.source.form][1](self.source, path)
        else:
            _course(self.source, self.policy, path)
        record = dict(sorted({**drawn(folder), self.name: digest(self.source)}.items()))
        (folder / _DRAWN).write_text(json.dumps(record, indent=1) + "\n")
        return True


def digest(source: Source) -> str:
    """Of all that is kept of a piece of evidence."""
    return hashlib.sha256(json.dumps(asdict(source), sort_keys=True).encode()).hexdigest()[:16]


def drawn(folder: Path) -> dict[str, str]:
    """Name of a picture -> digest of what it was drawn from."""
    path = folder / _DRAWN
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found
