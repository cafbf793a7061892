"""Marked blocks of a Markdown document: what is between the marks is made of docs/results, the rest is written by hand.

<!-- begin KIND NAME WORD ... -->      made of docs/results/NAME.json, and replaced whenever that changes
<!-- awaits KIND NAME WORD ... -->     there is no such file yet: by hand until there is, then as above
<!-- end -->                           closes either
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_nightjar.errors import UserError

_BLOCK = re.compile(r"^<!-- (begin|awaits) (.+?) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!-- (begin|awaits|end)\b.*$", re.MULTILINE)

Render = Callable[[str, Sequence[str]], str | None]


@dataclass(frozen=True, slots=True)
class Block:
    """`state`: begin or awaits."""

    state: str
    kind: str
    words: tuple[str, ...]
    content: str

    @property
    def name(self) -> str:
        return " ".join((self.kind, *self.words))

    def text(self) -> str:
        """As it stands in a document."""
        return f"<!-- {self.state} {self.name} -->\n{self.content}<!-- end -->"


def blocks(path: Path) -> list[Block]:
    """Those of a document, in order; `UserError` where a mark has no partner."""
    text = path.read_text()
    found = [_block(match) for match in _BLOCK.finditer(text)]
    marks = [match.group(1) for match in _MARK.finditer(text)]
    if len(marks) != 2 * len(found) or set(marks[1::2]) - {"end"}:
        raise UserError(f"{path}: {len(marks)} marks make {len(found)} blocks: each begin or awaits needs an end")
    return found


def fill(path: Path, render: Render) -> str:
    """The document with its blocks as they must be.

    Raises:
        UserError: a `begin` has nothing to be made of, or `render` knows no such block.
    """
    blocks(path)

    def made(match: re.Match[str]) -> str:
        block = _block(match)
        try:
            content = render(block.kind, block.words)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if content is not None:
            return Block("begin", block.kind, block.words, f"\n{content}\n\n").text()
        if block.state == "begin":
            raise UserError(f"{path}: nothing in docs/results for the block {block.name!r}")
        return match.group(0)

    return _BLOCK.sub(made, path.read_text())


def _block(match: re.Match[str]) -> Block:
    kind, *words = match.group(2).split()
    return Block(match.group(1), kind, tuple(words), match.group(3))
