"""Text that anybody can keep and look at: without what a database, a reply or a terminal takes for something else."""

from __future__ import annotations

import re

# NUL and halves of surrogate pairs: no database keeps them. Other control characters, among them the beginning of every
# escape sequence: a terminal obeys them. Marks of direction and the two separators: what is read is not what is there.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LINE_BREAKS = re.compile("[\t\n]")


def is_text(text: str, *, one_line: bool) -> bool:
    return _NOT_TEXT.search(text) is None and not (one_line and _LINE_BREAKS.search(text))


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` with a mark in place of each letter that is none; with `one_line`, a blank for each tab and line break."""
    whole = _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
    return _LINE_BREAKS.sub(" ", whole) if one_line else whole
