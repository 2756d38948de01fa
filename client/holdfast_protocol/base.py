"""The base of every wire model: unknown fields are refused, so that a misspelt one never passes silently."""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

LARGEST_INTEGER = 2**62
"""Of what is kept as a number: both databases have 64 bits."""

_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""A project's or a run's name: letters, digits, `.`, `_`, `-`; at most 100."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in lower-case hex."""

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,62}$")]


def text_to_keep(text: str, most: int) -> str:
    """`text`, from anywhere, as a Request takes it: at most so many letters, a mark in place of what is none."""
    return _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)[:most]


class Request(BaseModel):
    """What a client sends. Unknown fields are an error: the service would silently not do what was asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        """JSON can spell text that no database keeps (NUL) and no reply can repeat (half of a surrogate pair)."""
        texts = (value,) if isinstance(value, str) else (*value, *value.values()) if isinstance(value, dict) else ()
        if any(isinstance(text, str) and _NOT_TEXT.search(text) for text in texts):
            raise ValueError("the text holds NUL or half of a surrogate pair; leave such characters out")
        return value


class Reply(BaseModel):
    """What the service answers. Unknown fields are ignored, so that an older client can read a newer service."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Item = TypeVar("Item")


class Page(Reply, Generic[Item]):
    """One page of a list. `next_cursor` is opaque; None on the last page."""

    items: list[Item]
    next_cursor: str | None = Field(default=None, description="Give it back as `cursor` for the next page.")
