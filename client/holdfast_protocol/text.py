"""Text that is safe to keep and show: without control characters that a terminal obeys, and without secrets.

Used before anything else is loaded (`holdfast --help`), so it imports no library.
"""

from __future__ import annotations

import re

# NUL and halves of surrogate pairs: no database keeps them. Other control characters, among them the beginning of every
# escape sequence: a terminal obeys them. Marks of direction and the two separators: they change how text appears.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LINE_BREAKS = re.compile("[\t\n]")


def is_text(text: str, *, one_line: bool) -> bool:
    return _NOT_TEXT.search(text) is None and not (one_line and _LINE_BREAKS.search(text))


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` with a mark in place of each such character; with `one_line`, a blank for each tab and line break."""
    whole = _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
    return _LINE_BREAKS.sub(" ", whole) if one_line else whole


_SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE), r"\1***@"),  # user and password of a URL
    (re.compile(r"(/[^\s?'\"]*)\?[^\s'\"]+"), r"\1?***"),  # the query of a URL, or of a path
    (re.compile(r"hold_[0-9a-f]{16}_[0-9a-zA-Z]+"), "hold_***"),
    (re.compile(r"whsec_[A-Za-z0-9+/=]+"), "whsec_***"),
)


def without_secrets(text: str) -> str:
    """`text` without URLs' queries and passwords, and without our tokens and webhooks' secrets: any error message may
    hold a signed URL. Idempotent."""
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text


def counted(count: int, one: str, more: str | None = None) -> str:
    """`1 chunk`, `2 chunks`. `more` is the word for any other number than one; without it, `one` and an s."""
    return f"{count} {one if count == 1 else more or one + 's'}"
