"""Projects and runs, the selectors by which people name a checkpoint, goodput, and advice on the save interval.

`GET /v1/projects`                                  -> Page[ProjectView]
`PUT /v1/projects/{project}`  (If-Match, if it changes something)  EditProject -> ProjectView
`GET /v1/projects/{project}`                        -> ProjectView
`GET /v1/projects/{project}/runs?status=&tag=`      -> Page[RunView]
`GET /v1/runs?status=&tag=`                         -> Page[RunView]   of all projects that the token sees
`PUT /v1/projects/{project}/runs/{run}`             -> RunView      (makes it; an existing one is fine)
`GET /v1/projects/{project}/runs/{run}`             -> RunView
`PATCH /v1/projects/{project}/runs/{run}`           (If-Match)  EditRun -> RunView
`POST /v1/projects/{project}/runs/{run}/forks`      ForkRun -> RunView      (the new one)
`GET /v1/projects/{project}/runs/{run}/metrics-history?name=&from_step=&to_step=&points=&attempt=` -> MetricsHistory
`GET /v1/projects/{project}/runs/{run}/goodput`     -> Goodput
`GET /v1/projects/{project}/runs/{run}/advice`      -> AdviceView

Selectors: `demo/gpt`, `demo/gpt@latest`, `demo/gpt@1200`, `demo/gpt@1200#3`, `demo/gpt@best:loss:max`, `demo/gpt@ck_…`.
`@1200` is step 1200 on the lineage; `#3` names the attempt (rule latest-follows-lineage). holdfast_protocol.pruning
deletes projects and runs and takes them back.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field

from holdfast_protocol.base import LARGEST_INTEGER, Label, Name, Reply, Request, RunName, example, since
from holdfast_protocol.checkpoints import ForkedFrom, nonfinite_name
from holdfast_protocol.pruning import InTrash
from holdfast_protocol.restores import RestorePoint
from holdfast_protocol.states import AttemptOutcome, QuotaKind, RunStatus

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_RUN = re.compile(rf"^(?P<project>{_NAME})/(?P<run>{_NAME})$")
_STEP = re.compile(r"^(?P<step>\d{1,18})(?:#(?P<attempt>\d{1,9}))?$")
_BEST = re.compile(r"^best:(?P<metric>[^:@#]{1,100})(?::(?P<mode>min|max))?$")
_ID = re.compile(r"^ck_[0-9a-f]{32}$")

EXPECTED = "write it as project/run, project/run@latest, project/run@1200, project/run@1200#3 or project/run@best:loss"


class SelectorError(ValueError):
    """The text is not a selector."""


@dataclass(frozen=True)
class Latest:
    def __str__(self) -> str:
        return "latest"


@dataclass(frozen=True)
class AtStep:
    step: int
    attempt: int | None = None

    def __str__(self) -> str:
        return f"{self.step}" if self.attempt is None else f"{self.step}#{self.attempt}"


@dataclass(frozen=True)
class Best:
    metric: str
    mode: Literal["min", "max"] = "min"

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.mode}"


@dataclass(frozen=True)
class ById:
    checkpoint_id: str

    def __str__(self) -> str:
        return self.checkpoint_id


Point = Latest | AtStep | Best | ById


def parse_run(text: str) -> RunName:
    """`demo/gpt` -> RunName. Raises SelectorError."""
    match = _RUN.match(text)
    if match is None:
        raise SelectorError(f"{text!r} is not the name of a run; write it as project/run, for example demo/gpt")
    return RunName(match["project"], match["run"])


def parse_point(text: str) -> Point:
    """The point after the `@`. Raises SelectorError."""
    if text in ("", "latest"):
        return Latest()
    if match := _STEP.match(text):
        return AtStep(int(match["step"]), int(match["attempt"]) if match["attempt"] else None)
    if match := _BEST.match(text):
        return Best(match["metric"], "max" if match["mode"] == "max" else "min")
    if _ID.match(text):
        return ById(text)
    raise SelectorError(f"{text!r} does not name a checkpoint; {EXPECTED}")


def parse_selector(text: str) -> tuple[RunName, Point]:
    """`demo/gpt@1200` -> (RunName, Point); without an `@` it is the latest. Raises SelectorError."""
    run, _, point = text.partition("@")
    return parse_run(run), parse_point(point)


def _quota(description: str, *, minor: int = 9) -> Any:
    return Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(minor), description=description)


class EditProject(Request):
    """Absent fields stay unchanged."""

    model_config = example({"quota_bytes": 10995116277760})

    sends_defaults: ClassVar[bool] = False

    quota_bytes: int | None = Field(
        default=None, ge=0, le=LARGEST_INTEGER, description="Bytes in the primary store; null: no limit."
    )
    quota_objects: int | None = _quota("Copies of chunks in the primary store; null: no limit.")
    quota_runs: int | None = _quota("Runs that are not in the trash; null: no limit.")
    quota_checkpoints: int | None = _quota("Checkpoints that are committed or uploading; null: no limit.")
    quota_rows: int | None = _quota(
        "Rows of the catalog: copies of chunks in the primary store, and entries of chunk lists; null: no limit.",
        minor=10,
    )
    soft_quota_bytes: int | None = _quota("From here on the service tells, and refuses nothing; null: it does not.")
    soft_quota_objects: int | None = _quota("Likewise, of objects.")
    soft_quota_runs: int | None = _quota("Likewise, of runs.")
    soft_quota_checkpoints: int | None = _quota("Likewise, of checkpoints.")
    soft_quota_rows: int | None = _quota("Likewise, of rows.", minor=10)


class QuotaView(Reply):
    kind: QuotaKind
    hard: int | None = Field(description="What would exceed it is refused; null: nothing is.")
    soft: int | None = Field(description="The service tells that it is near and reached; null: it does not.")
    used: int = Field(description="What counts now.")


class ProjectView(Reply):
    id: str
    name: str
    created_at: datetime
    quota_bytes: int | None
    etag: str = Field(default="", description="The version of the editable fields; for If-Match.")
    quota_used_bytes: int = Field(
        default=0,
        description="What counts against the quota: bytes in the primary store, those of uploads that are under way "
        "among them.",
    )
    quotas: list[QuotaView] = Field(default_factory=list, description="One of each kind; an older service tells none.")
    stored_bytes: int = Field(description="Bytes of the copies of the project's chunks, in all stores together.")
    logical_bytes: int = Field(default=0, description="Bytes of the states of its committed checkpoints.")
    deduplicated_bytes: int = Field(default=0, description="Bytes that these did not send, because the store had them.")
    runs: int
    in_trash: InTrash | None = Field(default=None, description="Who deleted it; null: it is not deleted.")


MOST_TAGS = 20


class EditRun(Request):
    """Absent fields stay unchanged."""

    model_config = example({"tags": ["baseline", "paper"], "note": "The paper's learning rate, on twice the data."})

    sends_defaults: ClassVar[bool] = False

    tags: list[Label] | None = Field(default=None, max_length=MOST_TAGS, description="All of them; [] for none.")
    note: str | None = Field(default=None, max_length=4000, description="Free text; an empty one takes it away.")


class ForkRun(Request):
    """Makes a run that begins with a checkpoint of another one, without a copy of a byte."""

    model_config = example({"selector": "1200", "name": "gpt-lower-lr"})

    selector: str = Field(
        default="latest", max_length=200, description="Which checkpoint: latest, 1200, 1200#3, best:loss:min or ck_…"
    )
    name: Name = Field(
        description="The new run's, in the same project, because no two projects share chunks. Between projects a "
        "model goes as a file: `holdfast checkpoints pull`, then `holdfast import`."
    )


class RunView(Reply):
    id: str
    project: str
    name: str
    created_at: datetime
    latest_attempt: int
    status: RunStatus | None = Field(default=None, description="Null from a service before protocol 1.3.")
    status_detail: str | None = Field(default=None, description="Why, in a sentence, if that is known.")
    last_step: int | None = Field(default=None, description="The last known step of its newest attempt.")
    last_heard_at: datetime | None = Field(
        default=None,
        description="The last sign of its newest attempt: its opening, a heartbeat, a call of a save, its end. "
        "Reads do not count.",
    )
    committed_checkpoints: int
    newest_step: int | None
    logical_bytes: int = Field(default=0, description="Bytes of the states of its committed checkpoints.")
    deduplicated_bytes: int = Field(default=0, description="Bytes that these did not send, because the store had them.")
    stored_bytes: int | None = Field(
        default=None,
        description="Bytes of the copies of their chunks, in all stores together, even if other runs need them too. "
        "Null in lists, because it is added up for one run at a time.",
    )
    restore_point: RestorePoint | None
    in_trash: InTrash | None = Field(default=None, description="Who deleted it; null: it is not deleted.")
    tags: list[str] = Field(default_factory=list, description="By people, for finding it again. In order.")
    note: str = Field(default="", description="By people, free text.")
    forked_from: ForkedFrom | None = Field(
        default=None, description="The checkpoint that it begins with, of another run; null: of none (since 1.10)."
    )
    etag: str = Field(default="", description="The version of tags and note; for If-Match.")


MOST_CURVES = 64
"""So many metrics of a run have a curve."""
MOST_POINTS_TOLD = 1000
"""In one report, of all metrics together."""
MOST_POINTS_SHOWN = 2000
"""Of one curve in one reply."""
MOST_POINTS_REPLIED = 20_000
"""In one reply; its curves share them."""

MetricName = Annotated[str, Field(min_length=1, max_length=100)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
ToldPoint = tuple[Annotated[int, Field(ge=0, le=LARGEST_INTEGER)], Finite | Literal["nan", "inf", "-inf"]]
"""The step, and the metric after it: a finite number, or the name of a value that is none (rule finite-metrics)."""


def _refuse_crowd(told: Mapping[str, Sequence[ToldPoint]]) -> Mapping[str, Sequence[ToldPoint]]:
    count = sum(map(len, told.values()))
    if count > MOST_POINTS_TOLD:
        raise ValueError(f"these are {count} points, and {MOST_POINTS_TOLD} are the most; leave some out")
    return told


ToldMetrics = Annotated[
    dict[MetricName, Annotated[list[ToldPoint], Field(max_length=MOST_POINTS_TOLD)]],
    Field(max_length=MOST_CURVES),
    AfterValidator(_refuse_crowd),
]


class Measured(NamedTuple):
    """A metric after one step of one attempt; the value may be NaN or infinite."""

    attempt: int
    step: int
    value: float

    @property
    def told(self) -> ToldPoint:
        return self.step, nonfinite_name(self.value) or self.value


def thinned(points: Iterable[Measured], most: int) -> list[Measured]:
    """At most `most` of the points (4 or more), by step and attempt. Pure; what it keeps of what it has kept is the
    same as of all.

    Steps are put into buckets, as wide as it takes (a power of two). Of each bucket the least, the greatest and the
    last finite value stay, and the first that is not finite: a spike is never hidden. Attempts have buckets of their
    own, unless one for each may be too many: then all share them, and steps alone tell them apart.
    """
    kept = sorted(points, key=lambda point: (point.step, point.attempt))
    if len(kept) <= most:
        return kept
    apart = len({point.attempt for point in kept}) * _MOST_OF_BUCKET <= most
    # The widest has all steps in one bucket, which is few enough for certain.
    wide = (kept[0].step ^ kept[-1].step).bit_length()
    narrow = bisect_left(range(wide), True, key=lambda width: _count_buckets(kept, width, apart=apart) <= most)
    reach = 0  # a bucket keeps three points or so: it is most often one of the next widths
    while narrow < wide:
        middle = min(narrow + reach, (narrow + wide) // 2)
        found = _of_buckets(kept, middle, apart=apart)
        if len(found) <= most:
            wide = middle
        else:
            # Wider buckets keep of these what they keep of all.
            kept, narrow, reach = found, middle + 1, 2 * reach + 1
    return _of_buckets(kept, narrow, apart=apart)


_MOST_OF_BUCKET = 4


def _count_buckets(points: Sequence[Measured], width: int, *, apart: bool) -> int:
    return len({(attempt if apart else 0, step >> width) for attempt, step, _ in points})


def _of_buckets(points: Sequence[Measured], width: int, *, apart: bool) -> list[Measured]:
    """`points` are in order. A bucket is 2**width steps, of one attempt if they are `apart`."""
    buckets: dict[tuple[int, int], list[Measured]] = {}
    for point in points:
        buckets.setdefault((point.attempt if apart else 0, point.step >> width), []).append(point)
    kept: list[Measured] = []
    for bucket in buckets.values():
        if len(bucket) == 1:
            kept += bucket
            continue
        finite = [point for point in bucket if isfinite(point.value)]
        stays = [point for point in bucket if not isfinite(point.value)][:1]
        if finite:
            stays += min(finite, key=_value), max(finite, key=_value), finite[-1]
        kept += {(point.step, point.attempt): point for point in stays}.values()
    return sorted(kept, key=lambda point: (point.step, point.attempt))


def _value(point: Measured) -> float:
    return point.value


class MetricPoint(Reply):
    step: int
    attempt: int
    value: float | None = Field(description="Null: it was not finite.")
    nonfinite: Literal["nan", "inf", "-inf"] | None = None


class MetricCurve(Reply):
    name: str
    points: list[MetricPoint] = Field(
        description="By step. Each was measured. Where there are more than were asked for, the least, the greatest and "
        "the last of each bucket of steps stand for it, and the first that was not finite."
    )


class CurveSegment(Reply):
    attempt: int
    max_step: int | None = Field(description="The run went on from here in a later attempt; null: to its end.")


class MetricsHistory(Reply):
    attempt: int | None = Field(description="Whose points these are; null: those of the run's lineage.")
    segments: list[CurveSegment] = Field(description="The attempts on the lineage, the newest first.")
    names: list[str] = Field(description="All metrics of the run that have a curve.")
    metrics: list[MetricCurve] = Field(description="Those that were asked for, by name.")


class SpentTime(Reply):
    """Seconds, of an attempt or of a run; all but `wall_seconds` add up to it."""

    wall_seconds: float = Field(description="From its opening to its end; of a run from the first to the last.")
    productive_seconds: float = Field(description="In steps that the run still has.")
    lost_seconds: float = Field(description="In steps that ran and were lost.")
    saving_seconds: float = Field(description="Training blocked by saves.")
    restoring_seconds: float
    restarting_seconds: float = Field(
        description="From the end of the attempt before, or its last sign, to the first step, without restoring."
    )
    idle_seconds: float = Field(
        description="The rest: after the last step that ended (hanging, draining, telling), and after a finished "
        "attempt until the next."
    )
    steps_run: int
    steps_kept: int = Field(description="Steps on the run's present lineage.")
    steps_lost: int


class AttemptGoodput(SpentTime):
    """Includes the time since the attempt before."""

    attempt: int
    outcome: AttemptOutcome | None
    resumed_from_step: int | None
    last_step: int | None
    step_seconds: float | None = Field(description="One step, without saves. Null: unknown.")


class Goodput(SpentTime):
    goodput: float | None = Field(description="productive_seconds / wall_seconds. Null while no step's time is known.")
    since: datetime | None
    until: datetime | None = Field(description="The end of the last attempt, or now.")
    attempts: list[AttemptGoodput] = Field(description="The oldest first.")


class AdviceSource(StrEnum):
    """The past that the advice is from: the nearest that has one."""

    RUN = "run"
    PROJECT = "project"
    FLEET = "fleet"
    """All runs of this service."""
    DEFAULT = "default"
    """No run's: the service has seen none yet."""


class AdviceBound(StrEnum):
    """Why the interval is not the one that would lose the least."""

    UNMEASURED = "unmeasured"
    """The run itself has saved nothing yet."""
    SHORTEST = "shortest"
    LONGEST = "longest"
    STORE = "store"
    """Saves would not be durable before the next one is due."""


class AdviceOutlook(Reply):
    """The expected loss at one interval."""

    interval_seconds: float
    lost_share: float = Field(description="Part of the training time, 0 to 1: saves, and repeated work.")


class AdviceView(Reply):
    project: str
    run: str
    interval_seconds: float = Field(description="From the end of a save's blocking to the next save.")
    steps: int | None = Field(description="The same in steps, at the rate of the newest attempt; null: not known.")
    best_seconds: float | None = Field(
        description="The interval that would lose the least, without bounds; null: no save measured."
    )
    bound: AdviceBound | None = Field(description="Why the interval is not the best one; null: it is.")
    between_interruptions_seconds: float = Field(description="The mean uptime until an attempt loses work.")
    interruptions_source: AdviceSource
    run_interruptions: int
    run_uptime_seconds: float
    blocked_seconds: float | None = Field(description="How long a save blocks training, on its slowest rank.")
    durable_seconds: float | None = Field(description="From a save's begin to its commit.")
    saves_measured: int
    saves_source: AdviceSource
    restart_seconds: float | None = Field(
        description="From an interruption until the next attempt trains. Lost at any interval; null: none seen."
    )
    outlook: list[AdviceOutlook] = Field(description="At half the interval, at it, at twice it; empty: not known.")
    reasons: list[str] = Field(description="The reasons, in sentences for people.")
