"""Retention: which checkpoints of a run stay. A policy is data, the union of its rules, with the names of restic's
`forget`. Without a policy no checkpoint ever expires.

Time counts back from the run's newest checkpoint, as in restic, not from now: a run that has ended keeps its
checkpoints. Hours, days, weeks (from Monday), months and years are those of UTC, by the moment of the commit; the
newest healthy checkpoint of each stays.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from holdfast_protocol.base import LARGEST_INTEGER, Label, Request

_SPAN = re.compile(
    r"(?=\S)(?:(?P<y>\d{1,3})y)?(?:(?P<m>\d{1,4})m)?(?:(?P<w>\d{1,4})w)?(?:(?P<d>\d{1,5})d)?(?:(?P<h>\d{1,6})h)?"
)
_EARLIEST_YEAR = 1


@dataclass(frozen=True)
class Span:
    """A span of time as restic writes it, for policies: `6h`, `7d`, `3m`, `1y6m`. Calendar units: a month before 31
    March is the end of February. There are no minutes, so `3m` has one meaning."""

    months: int
    days: int
    hours: int

    def before(self, moment: datetime) -> datetime:
        """The moment that lies this span earlier, at the earliest the calendar's first."""
        month = moment.year * 12 + moment.month - 1 - self.months
        year, month = divmod(month, 12)
        if year < _EARLIEST_YEAR:
            return datetime.min.replace(tzinfo=moment.tzinfo)
        day = min(moment.day, calendar.monthrange(year, month + 1)[1])
        try:
            return moment.replace(year=year, month=month + 1, day=day) - timedelta(days=self.days, hours=self.hours)
        except OverflowError:
            return datetime.min.replace(tzinfo=moment.tzinfo)


def parse_span(text: str) -> Span:
    """`1y6m`, `2w`, `7d`, `6h` -> Span; units in this order, each once. Raises ValueError."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a span of time; write for example 6h, 7d, 4w, 3m (months) or 1y6m, and no minutes"
        )
    number = {unit: int(count or 0) for unit, count in match.groupdict().items()}
    if not any(number.values()):
        raise ValueError(f"{text!r} is no time at all; leave the rule out instead")
    return Span(number["y"] * 12 + number["m"], number["w"] * 7 + number["d"], number["h"])


def _checked(text: str) -> str:
    parse_span(text)
    return text


SpanText = Annotated[str, AfterValidator(_checked)]


_MOST = 1_000_000


def _count(value: Any) -> Any:
    if value == "unlimited" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST):
        return value
    raise ValueError(f"it must be a number from 1 to {_MOST}, or unlimited; leave the rule out for none")


Count = Annotated[int | Literal["unlimited"], BeforeValidator(_count)]


class KeepBest(Request):
    """The `n` best finite values of a metric; of equal ones the newest."""

    metric: str = Field(min_length=1, max_length=100)
    mode: Literal["min", "max"] = "min"
    n: int = Field(default=1, ge=1, le=1_000_000)


class RetentionPolicy(Request):
    """A checkpoint stays if any of these rules keeps it."""

    keep_last: Count | None = Field(default=None, description="The newest n.")
    keep_hourly: Count | None = Field(default=None, description="One of each of the last n hours that have one.")
    keep_daily: Count | None = Field(default=None, description="One of each of the last n days that have one.")
    keep_weekly: Count | None = Field(default=None, description="One of each of the last n weeks that have one.")
    keep_monthly: Count | None = Field(default=None, description="One of each of the last n months that have one.")
    keep_yearly: Count | None = Field(default=None, description="One of each of the last n years that have one.")
    keep_within: SpanText | None = Field(default=None, description="Every one of this span, such as 6h.")
    keep_within_hourly: SpanText | None = Field(default=None, description="One an hour within this span.")
    keep_within_daily: SpanText | None = Field(default=None, description="One a day within this span, such as 7d.")
    keep_within_weekly: SpanText | None = Field(default=None, description="One a week within this span, such as 3m.")
    keep_within_monthly: SpanText | None = Field(default=None, description="One a month within this span.")
    keep_within_yearly: SpanText | None = Field(default=None, description="One a year within this span.")
    keep_every_steps: int | None = Field(
        default=None, ge=1, le=LARGEST_INTEGER, description="Every step that is a multiple of n."
    )
    keep_best: list[KeepBest] = Field(
        default_factory=list,
        max_length=20,
        description="The n best of a metric. A checkpoint without a finite value cannot be judged, and stays.",
    )
    keep_labels: list[Label] = Field(
        default_factory=list, max_length=50, description="Every checkpoint with one of these."
    )

    @field_validator("keep_best", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict | KeepBest) else value

    @model_validator(mode="after")
    def _some_rule(self) -> RetentionPolicy:
        if not any(getattr(self, name) for name in RetentionPolicy.model_fields):
            raise ValueError(
                "a retention policy needs a rule, such as keep_last: 5; without one nearly everything would expire. "
                "To keep everything, delete the policy"
            )
        return self

    def rules(self) -> dict[str, Any]:
        """Only the fields that are set, as JSON values: the stored and shown form of a policy."""
        return self.model_dump(mode="json", exclude_defaults=True)


PRESETS: dict[str, RetentionPolicy] = {
    # The last few, whatever happened before.
    "ring-buffer": RetentionPolicy(keep_last=5),
    # For a restart, one a day to look back at, and the best by the loss that the job reports.
    "periodic-best": RetentionPolicy(keep_last=3, keep_daily=7, keep_best=[KeepBest(metric="loss", n=3)]),
    # A long run: everything for 6 hours, one a day for 7 days, one a week for 3 months, milestones for ever.
    "tiered": RetentionPolicy(
        keep_within="6h", keep_within_daily="7d", keep_within_weekly="3m", keep_labels=["milestone"]
    ),
}


class ReasonKind(StrEnum):
    """Why a checkpoint stays or expires. Reasons of rules have the rule's name."""

    KEEP_LAST = "keep_last"
    KEEP_HOURLY = "keep_hourly"
    KEEP_DAILY = "keep_daily"
    KEEP_WEEKLY = "keep_weekly"
    KEEP_MONTHLY = "keep_monthly"
    KEEP_YEARLY = "keep_yearly"
    KEEP_WITHIN = "keep_within"
    KEEP_WITHIN_HOURLY = "keep_within_hourly"
    KEEP_WITHIN_DAILY = "keep_within_daily"
    KEEP_WITHIN_WEEKLY = "keep_within_weekly"
    KEEP_WITHIN_MONTHLY = "keep_within_monthly"
    KEEP_WITHIN_YEARLY = "keep_within_yearly"
    KEEP_EVERY_STEPS = "keep_every_steps"
    KEEP_BEST = "keep_best"
    KEEP_LABELS = "keep_labels"
    METRIC_MISSING = "metric_missing"
    """A metric of keep_best is missing or not finite: it cannot be judged."""
    UPLOADING = "uploading"
    RESTORE_POINT = "restore_point"
    NEWEST_HEALTHY = "newest_healthy"
    NEWEST_PROVEN = "newest_proven"
    """One of the two newest points whose every byte was hashed by the store or the service."""
    UNPROVEN = "unproven"
    """Not proven yet, in a run that has fewer than two proven points."""
    NEWEST_COPIED = "newest_copied"
    """The newest healthy point that is whole in a store beside the primary."""
    RESUMED_FROM = "resumed_from"
    BEING_READ = "being_read"
    PINNED = "pinned"
    HELD = "held"
    NO_POLICY = "no_policy"
    NO_RULE = "no_rule"
    """The only reason to expire."""
    CHANGED = "changed"
    """It was changed between the plan and its lock; plan again."""


@dataclass(frozen=True, slots=True)
class Reason:
    """For programs, and in words."""

    kind: ReasonKind
    detail: str
