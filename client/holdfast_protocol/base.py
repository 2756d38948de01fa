"""The base of every wire model: unknown fields are refused, so that a misspelt one never passes silently."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, field_validator
from pydantic.fields import FieldInfo

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


def since(minor: int) -> dict[str, JsonValue]:
    """For a Request's field that an older service does not know: `Field(default=None, json_schema_extra=since(3))`.
    It is left out for a service of an older minor version (`body_for`)."""
    return {"since": f"1.{minor}"}


class Request(BaseModel):
    """What a client sends. Unknown fields are an error: the service would silently not do what was asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    largest_body_bytes: ClassVar[int] = 64 * 1024
    """As JSON; the service reads no more of it."""

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        """JSON can spell text that no database keeps (NUL) and no reply can repeat (half of a surrogate pair)."""
        texts = (value,) if isinstance(value, str) else (*value, *value.values()) if isinstance(value, dict) else ()
        if any(isinstance(text, str) and _NOT_TEXT.search(text) for text in texts):
            raise ValueError("the text holds NUL or half of a surrogate pair; leave such characters out")
        return value


def body_for(minor: int, body: BaseModel) -> bytes:
    """The JSON of `body` for a service that speaks 1.`minor`: without the fields that it does not know."""
    unknown = {name for name, field in type(body).model_fields.items() if _since(field) > minor}
    return body.model_dump_json(exclude=unknown or None).encode()


def _since(field: FieldInfo) -> int:
    extra = field.json_schema_extra
    return int(str(extra["since"]).partition(".")[2]) if isinstance(extra, dict) and "since" in extra else 0


class Reply(BaseModel):
    """What the service answers. Unknown fields are ignored, so that an older client can read a newer service."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Item = TypeVar("Item")


class Page(Reply, Generic[Item]):
    """One page of a list. `next_cursor` is opaque; None on the last page."""

    items: list[Item]
    next_cursor: str | None = Field(default=None, description="Give it back as `cursor` for the next page.")
