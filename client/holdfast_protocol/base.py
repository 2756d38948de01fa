"""The base of every wire model: unknown fields are refused, so that a misspelt one never passes silently."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""A project's or a run's name: letters, digits, `.`, `_`, `-`; at most 100."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in lower-case hex."""

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,62}$")]


class Request(BaseModel):
    """What a client sends. Unknown fields are an error: the service would silently not do what was asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    """What the service answers. Unknown fields are ignored, so that an older client can read a newer service."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Item = TypeVar("Item")


class Page(Reply, Generic[Item]):
    """One page of a list. `next_cursor` is opaque; None on the last page."""

    items: list[Item]
    next_cursor: str | None = Field(default=None, description="Give it back as `cursor` for the next page.")
