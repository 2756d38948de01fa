"""The base of every wire model, names, the fencing token, and the protocol's version.

Both sides send the version in the `Holdfast-Protocol` header of every request and reply. An older minor version is
served; another major version is refused with both numbers (rule protocol-version).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from holdfast_protocol.text import is_text, printable

PROTOCOL_HEADER = "Holdfast-Protocol"
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 11
"""1: chunks may be stored encoded (codecs.py). A read of a chunk that an older client cannot decode is refused. Saves
may be pushed late (checkpoints.py); an older client never begins one.
2: operations: policies, trash, holds, copies in other stores, tiers, audit events. An older client never asks for
them, and its replies are unchanged.
3: survival: attempts report their progress and why they ended; quarantine; advice on when to save; webhooks.
4: the fencing token names the launch. An older client is fenced by epoch and number alone.
5: a manifest has each rank's whole report on its shard (ShardSummary). An older service leaves some of it out.
6: a begin carries the first offers of ranks, and ranks of one host seal in one call. An older service answers the begin
alone and does not know that call: each rank offers and seals by itself.
7: the choice of a restore point tells what its attempt ran with, and a read brings a chunk list along. An older service
tells neither: nothing is compared, and the rank asks for the list.
8: an attempt gives the configuration of its job. An older service is not told it.
9: heartbeats carry what the job has measured, runs have tags and a note, and tokens limits of their own. An older
service is not told the metrics and the limits.
10: a run may begin with another run's checkpoint, whose indexes name the other run. An older client would take that
for damage, so it is refused the manifest of such a checkpoint, with both numbers.
11: a begin says which save of its attempt it is. An older service is not told it, and joins what is of the same step.
"""
PROTOCOL_VERSION = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"

_LONGEST_MINOR = 6


def minor_of(other: str) -> int:
    """The minor version that a peer of our major version announces. Raises ValueError if it is malformed."""
    return int(other.partition(".")[2])


def speaks_with(other: str) -> bool:
    """Whether a peer that announces `other` ("major.minor") can be served. Malformed announcements cannot."""
    major, _, minor = other.partition(".")
    return major == str(PROTOCOL_MAJOR) and minor.isdecimal() and len(minor) <= _LONGEST_MINOR


LARGEST_INTEGER = 2**62
"""For stored numbers: both databases have 64 bits."""

_SHORT_LETTERS = 300
_CHECKED_ITEMS = 100

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""A project's or a run's name: letters, digits, `.`, `_`, `-`; at most 100."""


@dataclass(frozen=True)
class RunName:
    """A run with its project: `demo/gpt`. `holdfast_protocol.runs` reads one from text."""

    project: str
    run: str

    def __str__(self) -> str:
        return f"{self.project}/{self.run}"


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in lower-case hex."""

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,62}$")]


def text_to_keep(text: str, most: int) -> str:
    """`text`, from anywhere, as a Request accepts it: cut to so many letters, a mark in place of each control
    character."""
    return printable(text[:most], one_line=most <= _SHORT_LETTERS)


def fits(most_bytes: int) -> AfterValidator:
    """For a map of a Request: bounds all its keys and values together, as JSON."""

    def check(value: Mapping[str, Any]) -> Mapping[str, Any]:
        taken = len(to_json(value))
        if taken > most_bytes:
            raise ValueError(f"all of it takes {taken} bytes, and {most_bytes} are the most; leave some out")
        return value

    return AfterValidator(check)


def since(minor: int) -> dict[str, JsonValue]:
    """For a Request's field that an older service does not know: `Field(default=None, json_schema_extra=since(3))`.
    `body_for` leaves it out for a service of an older minor version."""
    return {"since": f"1.{minor}"}


def example(value: dict[str, JsonValue]) -> ConfigDict:
    """For a Request's `model_config`: the example that OpenAPI shows."""
    return ConfigDict(json_schema_extra={"examples": [value]})


class Request(BaseModel):
    """A client's message. Unknown fields are refused: the service would silently ignore a misspelt one. So are NaN and
    infinity, which JSON's readers take: one of them in a sum makes NaN of the advice to every run of the service."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    largest_body_bytes: ClassVar[int] = 64 * 1024
    """As JSON; the service reads no further."""

    sends_defaults: ClassVar[bool] = True
    """False: an absent field differs from a null one."""

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses text that no database keeps, no reply can repeat, or a terminal obeys. Longer lists are digests and
        ids, which have a pattern."""
        texts: Iterable[Any] = ()
        one_line = True
        if isinstance(value, str):
            texts, one_line = (value,), _most_letters(cls.model_fields[str(info.field_name)]) <= _SHORT_LETTERS
        elif isinstance(value, dict):
            texts = (*value, *value.values())
        elif isinstance(value, list) and len(value) <= _CHECKED_ITEMS:
            texts = value
        if not all(is_text(text, one_line=one_line) for text in texts if isinstance(text, str)):
            raise ValueError(
                "the text holds control characters, marks of direction or half of a surrogate pair"
                + (", or a line break where it is short" if one_line else "")
                + "; leave them out"
            )
        return value


def body_for(minor: int, body: BaseModel) -> bytes:
    """The JSON of `body` for a service that speaks 1.`minor`: without the fields that it does not know."""
    unknown = {name for name, field in type(body).model_fields.items() if _since(field) > minor}
    left_out = isinstance(body, Request) and not body.sends_defaults
    return body.model_dump_json(exclude=unknown or None, exclude_unset=left_out).encode()


def _most_letters(field: FieldInfo) -> int:
    """Fields without such a limit have a pattern."""
    return max((most for each in field.metadata if (most := getattr(each, "max_length", None)) is not None), default=0)


def _since(field: FieldInfo) -> int:
    extra = field.json_schema_extra
    return int(str(extra["since"]).partition(".")[2]) if isinstance(extra, dict) and "since" in extra else 0


class Reply(BaseModel):
    """The service's answer. Unknown fields are ignored, so that an older client can read a newer service."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Item = TypeVar("Item")


class Page(Reply, Generic[Item]):
    """One page of a list. `next_cursor` is opaque; None on the last page."""

    items: list[Item]
    next_cursor: str | None = Field(default=None, description="Send it as `cursor` for the next page.")


LaunchId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class Fence(Request):
    """The fencing token: every write of a training job carries it. An older epoch or attempt is `stale_attempt`."""

    epoch: int = Field(ge=1, description="The catalog's epoch (rule fencing-token).")
    attempt: int = Field(ge=1)
    launch_id: LaunchId | None = Field(
        default=None,
        json_schema_extra=since(4),
        description="The launch that opened the attempt: a database that fails over to an older copy gives the "
        "number to another one. Null: a client before 1.4, which is compared by its number alone.",
    )
