"""The documents that show evidence: which of it they use, and whether they show what docs/results holds."""

from collections.abc import Callable
from pathlib import Path

from evidence.blocks import Block, blocks, fill
from evidence.kinds import render, sources_of
from evidence.pictures import Picture
from evidence.published import publish
from evidence.sources import reader, write_source
from sglang_nightjar.errors import UserError


class Documents:
    """The Markdown files of a docs folder that have blocks; `docs/results` and `docs/plots` are what they show."""

    def __init__(self, docs: Path) -> None:
        self.results, self.plots = docs / "results", docs / "plots"
        self.read = reader(self.results)
        self._blocks = {path: found for path in sorted(docs.glob("*.md")) if (found := blocks(path))}

    def used(self) -> list[str]:
        """Names of all files in docs/results that a block is made of, or waits for."""
        names = (name for block in self._all() for name in sources_of(block.kind, block.words))
        return list(dict.fromkeys(names))

    def take(self, folder: Path, say: Callable[[str], None]) -> None:
        """Keeps, in docs/results, what the blocks need of the benchmarks' JSON in `folder`."""
        used = self.used()
        found = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(".about.json")]
        for path in found:
            if path.stem not in used:
                say(f"{path.name} is left out: no block of the documents is made of it")
                continue
            kept = write_source(publish(path), self.results)
            say(f"{path.name} -> {kept} ({kept.stat().st_size} bytes)")

    def draw(self, say: Callable[[str], None]) -> None:
        """Draws the pictures that blocks show and that are missing or of other figures."""
        for name, *words in dict.fromkeys(block.words for block in self._all() if block.kind == "picture"):
            source = self.read(name)
            if source is not None and (picture := Picture(source, *words)).draw(self.plots):
                say(f"drew {self.plots / picture.name}.png")

    def write(self, say: Callable[[str], None]) -> None:
        """Fills all blocks; nothing is written where one cannot be."""
        for path, text in {path: self._filled(path) for path in self._blocks}.items():
            if text != path.read_text():
                path.write_text(text)
                say(f"wrote {path}")

    def problems(self) -> list[str]:
        """What the documents do not show as it is in docs/results, or show without saying where it is from."""
        found: list[str] = []
        for path, written in self._blocks.items():
            try:
                text = self._filled(path)
            except UserError as error:
                found.append(str(error))
                continue
            if text != path.read_text():
                names = ", ".join(repr(block.name) for block in written if self._differs(block))
                found.append(f"{path}: not what docs/results holds: {names}; run scripts/python bench/report.py")
        explained = {block.words[0] for block in self._all() if block.kind == "about"}
        for name in self.used():
            if self.read(name) is not None and name not in explained:
                found.append(f"{name}.json is shown, and no block 'about {name}' says how it was made")
        for path in sorted(self.results.glob("*.json")):
            if path.stem not in self.used():
                found.append(f"{path} is shown nowhere")
        text = "".join(path.read_text() for path in self._blocks)
        found += [f"{path} is shown nowhere" for path in sorted(self.plots.glob("*.png")) if path.name not in text]
        return found

    def missing(self) -> list[str]:
        """Names of the files that blocks wait for."""
        return [name for name in self.used() if self.read(name) is None]

    def _all(self) -> list[Block]:
        return [block for found in self._blocks.values() for block in found]

    def _render(self, kind: str, words: tuple[str, ...]) -> str | None:
        return render(kind, words, self.read, self.plots)

    def _filled(self, path: Path) -> str:
        return fill(path, self._render)

    def _differs(self, block: Block) -> bool:
        content = self._render(block.kind, block.words)
        return content is not None and (block.state == "awaits" or block.content != f"\n{content}\n\n")
