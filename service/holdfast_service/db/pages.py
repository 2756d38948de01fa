"""Opaque cursors: where the next page begins, by the sort key of the last row and never by an offset.

An offset would skip or repeat rows when others are written in between. A cursor says for which list it was made; one
that was altered or belongs to another list is refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.text import is_text
from holdfast_service.errors import ProblemError

Row = TypeVar("Row")

DEFAULT_PAGE = 50
MAX_PAGE = 500


def encode_cursor(kind: str, *key: str | int) -> str:
    text = json.dumps([kind, *key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def decode_cursor(kind: str, cursor: str, *types: type) -> tuple[Any, ...]:
    """The key that was encoded, each part of the type that is named. Raises `invalid_request`."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        made_for, *key = json.loads(text)
    except (ValueError, TypeError):
        raise _refused() from None
    if made_for != kind or [type(part) for part in key] != list(types):
        raise _refused()
    if not all(is_text(part, one_line=True) for part in key if isinstance(part, str)):
        raise _refused()  # JSON can spell what no database takes
    return tuple(key)


def cut_page(
    kind: str, rows: Sequence[Row], limit: int, key: Callable[[Row], tuple[str | int, ...]]
) -> tuple[Sequence[Row], str | None]:
    """This page's rows among the `limit` + 1 that were asked for, and the cursor if there are more."""
    shown = rows[:limit]
    return shown, encode_cursor(kind, *key(shown[-1])) if len(rows) > limit else None


def page_of(kind: str, items: Iterable[Row], key: Callable[[Row], str], *, cursor: str | None, limit: int) -> Page[Row]:
    """One page of what is in memory, in the order of its keys, which differ."""
    (after,) = (None,) if cursor is None else decode_cursor(kind, cursor, str)
    rest = sorted((item for item in items if after is None or key(item) > after), key=key)
    shown, next_cursor = cut_page(kind, rest, limit, lambda item: (key(item),))
    return Page(items=list(shown), next_cursor=next_cursor)


def moment_to_text(moment: datetime) -> str:
    return moment.isoformat()


def moment_from_text(text: str) -> datetime:
    """Raises `invalid_request`."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _refused() from None
    if moment.tzinfo is None:
        raise _refused()
    return moment


def _refused() -> ProblemError:
    return ProblemError(
        ProblemCode.INVALID_REQUEST,
        "The cursor is not one of this list. Give back `next_cursor` as it was, or leave it out for the first page.",
    )
