"""Tiers: when checkpoints move to colder storage, and the cost of a thaw.

`GET  /v1/projects/{project}/runs/{run}/tiers/plan`                     -> TierPlan
`POST /v1/checkpoints/{id}/thaw`                        RequestThaw     -> ThawView
`GET  /v1/checkpoints/{id}/thaw`                                        -> ThawView

A policy of kind `tiers` is a TierPolicy. Each store has the limits and prices of its classes
(stores/<kind>/classes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast_protocol.base import Label, Reply, Request, example
from holdfast_protocol.policies.retention import SpanText, parse_span
from holdfast_protocol.states import CheckpointKind, Tier


class StorageClass(StrEnum):
    """By how often it is read, from the hottest to the coldest. Other chunks are in the bucket's default class. Each
    store knows its vendor's names, and has some of these classes or none."""

    INFREQUENT = "infrequent"
    """S3: STANDARD_IA. Azure: cool."""
    RARE = "rare"
    """Read at once, but expensively. S3: GLACIER_IR. Azure: cold."""
    ARCHIVE = "archive"
    """S3: GLACIER. Azure: archive."""
    DEEP_ARCHIVE = "deep_archive"
    """S3: DEEP_ARCHIVE."""


COLD_STORE = "cold"
"""The target of a rule that moves to the store of role cold (HOLDFAST_COLD_STORE)."""

ARCHIVED = frozenset({StorageClass.ARCHIVE, StorageClass.DEEP_ARCHIVE})
"""These must be thawed before a read."""

LONGEST_THAW_DAYS = 365


class ThawSpeed(StrEnum):
    BULK = "bulk"
    STANDARD = "standard"
    EXPEDITED = "expedited"


@dataclass(frozen=True)
class ClassTerms:
    """`minimum_days`: earlier removal is paid for until then. `thaw_seconds`: the documented longest time of a thaw;
    empty if none is needed. `retrieval_dollars`: per GiB that is read or thawed."""

    minimum_days: int
    thaw_seconds: dict[ThawSpeed, int]
    retrieval_dollars: dict[ThawSpeed | None, float]


def coldness(target: str | None) -> int:
    """For comparing: 0 is hot, more is colder. Pure."""
    if target is None:
        return 0
    order = [*StorageClass, COLD_STORE]
    return order.index(target) + 1


def must_be_thawed(target: str | None) -> bool:
    """Whether a chunk that was moved there cannot be read at once."""
    return target == COLD_STORE or target in ARCHIVED


class TierRule(Request):
    """`after` this span since its commit a checkpoint moves on: to a storage class, or to the cold store."""

    after: SpanText = Field(examples=["7d"])
    storage_class: StorageClass | None = None
    to: Literal["cold"] | None = Field(default=None, description="The store of HOLDFAST_COLD_STORE.")

    @model_validator(mode="after")
    def _one_target(self) -> TierRule:
        if (self.storage_class is None) == (self.to is None):
            raise ValueError(
                "a rule has either storage_class (for a bucket with classes) or `to: cold` (for the cold store)"
            )
        return self

    @property
    def target(self) -> str:
        return self.storage_class.value if self.storage_class is not None else COLD_STORE


class StaysHot(Request):
    """Which checkpoints no rule moves. The two newest healthy ones of each run, an active attempt's restore point, and
    checkpoints that are being read always stay hot too."""

    labels: list[Label] = Field(default_factory=list, max_length=20)
    kinds: list[CheckpointKind] = Field(default_factory=list)
    pinned: bool = True


class TierPolicy(Request):
    """When checkpoints get cold. A chunk that several checkpoints share is as hot as the hottest of them."""

    rules: list[TierRule] = Field(min_length=1, max_length=4)
    stay_hot: StaysHot = Field(default_factory=StaysHot)

    @model_validator(mode="after")
    def _ever_colder(self) -> TierPolicy:
        targets = [rule.target for rule in self.rules]
        if COLD_STORE in targets and len(targets) > 1:
            raise ValueError("`to: cold` stands alone: a checkpoint in the cold store does not move on")
        for earlier, later in zip(self.rules, self.rules[1:], strict=False):
            if _rough_days(later.after) <= _rough_days(earlier.after):
                raise ValueError(f"the rule after {later.after} must come later than the one after {earlier.after}")
            if coldness(later.target) <= coldness(earlier.target):
                raise ValueError(f"{later.target} is not colder than {earlier.target}: order the rules by their span")
            if must_be_thawed(earlier.target):
                raise ValueError(
                    f"nothing moves on from {earlier.target}: it would have to be thawed first. Keep the last one only"
                )
        return self

    def targets(self) -> Iterator[str]:
        return (rule.target for rule in self.rules)


def _rough_days(span: str) -> float:
    parsed = parse_span(span)
    return parsed.months * 30.4 + parsed.days + parsed.hours / 24


ThawDays = Annotated[int, Field(ge=1, le=LONGEST_THAW_DAYS)]


class RequestThaw(Request):
    """Repeating it prolongs the thaw; it never shortens it."""

    model_config = example({"speed": "bulk"})

    days: ThawDays = Field(default=3, description="How long it can be read, from the thaw's end on.")
    speed: ThawSpeed = Field(default=ThawSpeed.STANDARD, description="The faster, the dearer.")


class ThawState(StrEnum):
    NOT_NEEDED = "not_needed"
    """It can be read now, and no thaw was asked for."""
    NEEDED = "needed"
    THAWING = "thawing"
    THAWED = "thawed"


class ThawView(Reply):
    """Whether a checkpoint can be read, and the time and cost of a thaw."""

    checkpoint_id: str
    project: str
    run: str
    attempt: int
    step: int
    tier: Tier
    state: ThawState
    requested_at: datetime | None
    speed: ThawSpeed | None
    expected_at: datetime | None = Field(description="When the thaw should be done, as the store documents it.")
    readable_until: datetime | None = Field(description="Kept readable at least until then; null: no end is set.")
    chunks: int
    readable_chunks: int
    thawing_chunks: int
    cold_bytes: int = Field(description="Bytes in the store that cannot be read now.")
    takes_seconds: dict[ThawSpeed, int] = Field(
        description="The longest time of a thaw, by speed; empty: none is needed."
    )
    costs_dollars: dict[ThawSpeed, float] = Field(description="List price of the retrieval, by speed.")


class TierPlanRow(Reply):
    """One checkpoint: the policy's target for it, and when."""

    checkpoint_id: str
    step: int
    attempt: int
    tier: Tier
    committed_at: datetime
    target: str | None = Field(description="The next target: a storage class or `cold`; null: it stays.")
    moves_at: datetime | None = Field(description="When it moves; in the past: it is due.")
    stays: str | None = Field(description="Why it stays hot.")
    moves_bytes: int = Field(
        description="Bytes in the store that move with this one: of chunks that no other checkpoint keeps hot longer."
    )


class TierPlanTotal(Reply):
    """The bytes that move to one target."""

    target: str
    due_bytes: int
    later_bytes: int
    minimum_days: int | None = Field(description="Earlier removal is paid for until then.")
    takes_seconds: dict[ThawSpeed, int] = Field(description="To read it again, by speed; empty: at once.")
    retrieval_dollars: float = Field(description="List price of reading all of it once, in the slowest way.")


class TierPlan(Reply):
    """A dry run: nothing has moved."""

    project: str
    run: str
    policy_level: Literal["project", "run"] | None = Field(description="Null: there is no policy, all stay hot.")
    policy_version: int | None
    rows: list[TierPlanRow]
    totals: list[TierPlanTotal]
    kept_hot_by_others_bytes: int = Field(
        description="Bytes in the store of this run's chunks that a checkpoint of another run keeps hot for ever."
    )
