"""Marked blocks: what is replaced, what is left as it is, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from evidence.blocks import blocks, fill

from sglang_nightjar.errors import UserError

TEXT = """# Title

Prose.

<!-- begin tax tax -->

old

<!-- end -->

More prose, <!-- begin in a line --> is none.

<!-- awaits closed paper a-set-up -->

by hand

<!-- end -->
<!-- awaits gpu gpu -->
<!-- end -->
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "results.md"
    path.write_text(TEXT)
    return path


def test_blocks_are_read(document: Path) -> None:
    found = blocks(document)
    assert [(block.state, block.name) for block in found] == [
        ("begin", "tax tax"),
        ("awaits", "closed paper a-set-up"),
        ("awaits", "gpu gpu"),
    ]
    assert found[1].words == ("paper", "a-set-up") and found[2].content == ""


def test_only_blocks_that_can_be_made_change(document: Path) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def render(kind: str, words: Sequence[str]) -> str | None:
        asked.append((kind, tuple(words)))
        return "new" if kind == "tax" else None

    assert fill(document, render) == TEXT.replace("old", "new")
    assert asked == [("tax", ("tax",)), ("closed", ("paper", "a-set-up")), ("gpu", ("gpu",))]
    assert document.read_text() == TEXT, "filling writes nothing"


def test_a_block_that_waited_is_made_from_then_on(document: Path) -> None:
    document.write_text(fill(document, lambda kind, words: kind))
    assert "by hand" not in document.read_text() and "awaits" not in document.read_text()
    assert [block.state for block in blocks(document)] == ["begin"] * 3
    assert fill(document, lambda kind, words: kind) == document.read_text()


def test_a_made_block_whose_file_is_gone_is_refused(document: Path) -> None:
    with pytest.raises(UserError, match="nothing in docs/results for the block 'tax tax'"):
        fill(document, lambda kind, words: None)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- begin tax tax -->\nfor ever\n",
        "<!-- end -->\n",
        "<!-- begin tax tax -->\n<!-- awaits gpu gpu -->\n<!-- end -->\n",
        "<!-- begin a b -->\n<!-- end -->\n<!-- end -->\n<!-- begin c d -->\n",
    ],
)
def test_marks_without_a_partner_are_refused(text: str, document: Path) -> None:
    document.write_text(text)
    with pytest.raises(UserError, match="needs an end"):
        blocks(document)
