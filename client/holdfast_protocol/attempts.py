"""Attempts: one incarnation of a training job. Opening one fences every older one (rule lock-order to 3).

`POST /v1/projects/{project}/runs/{run}/attempts`              OpenAttempt   -> AttemptOpened
`GET  /v1/projects/{project}/runs/{run}/attempts[/{number}]`                 -> Page[AttemptView] | AttemptView
`GET  .../attempts/{number}/config`                                          -> ConfigView
`GET  /v1/checkpoints/{id}/diff?against={id}`                                -> CheckpointDiff
`PUT  .../attempts/{number}/resumed-from`                      ResumedFrom   -> AttemptView
`POST .../attempts/{number}/heartbeat`                         Heartbeat     -> HeartbeatReply
`POST .../attempts/{number}/end`                               EndAttempt    -> AttemptView
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from math import isfinite
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, JsonValue

from holdfast_protocol.base import LARGEST_INTEGER, Fence, LaunchId, Reply, Request, example, fits, since
from holdfast_protocol.checkpoints import CheckpointView, Component, MetricValue
from holdfast_protocol.restores import RestoreDecision, Skipped
from holdfast_protocol.runs import ToldMetrics
from holdfast_protocol.states import AttemptOutcome, Doing
from holdfast_protocol.text import is_text

Environment = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=100)], Annotated[str, Field(max_length=1000)]],
    Field(max_length=100),
    fits(16 * 1024),
]


MOST_CONFIG_BYTES = 64 * 1024
"""As JSON."""
DEEPEST_CONFIG = 32
MOST_PATH_LETTERS = 2 * 1024**2
"""Of the paths to all values together: one long key above a list of thousands stands in thousands of paths."""
MOST_DIFFERENCES = 1000


def _is_plain(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Raises ValueError for what the catalog cannot keep, or could not compare."""
    letters = 0
    for path, value, depth in _walk(config):
        letters += len(path)
        if letters > MOST_PATH_LETTERS:
            raise ValueError("the paths to its values are too long, all together; shorten its keys, or nest it less")
        if depth > DEEPEST_CONFIG:
            raise ValueError(f"{path} lies more than {DEEPEST_CONFIG} levels deep; flatten it")
        if not all(is_text(each, one_line=False) for each in (path, value) if isinstance(each, str)):
            raise ValueError("it holds text with characters that no database keeps; leave them out")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON has no number for; give it as a text")
    return config


Config = Annotated[dict[str, JsonValue], Field(max_length=1000), fits(MOST_CONFIG_BYTES), AfterValidator(_is_plain)]


class ConfigDifference(Reply):
    path: str = Field(description="Where it lies, such as `optimizer.betas[0]`.")
    before: JsonValue = Field(default=None, description="Null, too, where there was nothing.")
    after: JsonValue = None
    change: str = Field(description="`added`, `removed` or `changed`.")


class ConfigView(Reply):
    attempt: int
    config: dict[str, JsonValue] | None = Field(description="Null: the job gave none.")
    compared_with: int | None = Field(
        description="The attempt that it is compared with: the one that was asked for, else the newest one before that "
        "gave a configuration; null: there is none."
    )
    differences: list[ConfigDifference] = Field(description="Each value that is another one, by its path.")
    differences_left_out: int = Field(default=0, description=f"Beyond the first {MOST_DIFFERENCES}.")


class MetricPair(Reply):
    name: str
    before: MetricValue | None = Field(description="Null: that checkpoint has no such metric.")
    after: MetricValue | None


class ComponentPair(Reply):
    name: str
    before: Component | None = Field(description="Null: that checkpoint has no such component.")
    after: Component | None


class CheckpointDiff(Reply):
    """Two checkpoints as the catalog knows them. It knows chunks, and no tensors."""

    before: CheckpointView
    after: CheckpointView
    config: list[ConfigDifference] | None = Field(
        description="Each value of their attempts' configurations that is another one. Null: one of them gave none."
    )
    config_left_out: int = Field(default=0, description=f"Beyond the first {MOST_DIFFERENCES}.")
    metrics: list[MetricPair] = Field(description="Every metric of either, by name.")
    components: list[ComponentPair] = Field(description="Every component of either, by name.")
    shared_chunks: int = Field(description="How many distinct chunks both consist of, documents included.")
    shared_bytes: int = Field(description="The bytes of these chunks: of `chunk_bytes` of both.")


def config_differences(before: dict[str, JsonValue], after: dict[str, JsonValue]) -> list[ConfigDifference]:
    """Value by value, ordered by path. A list is compared item by item. An empty map or list is a value too."""
    then, now = dict(_leaves(before)), dict(_leaves(after))
    found = []
    for path in sorted(then.keys() | now.keys()):
        if path not in then:
            found.append(ConfigDifference(path=path, after=now[path], change="added"))
        elif path not in now:
            found.append(ConfigDifference(path=path, before=then[path], change="removed"))
        elif not _same(then[path], now[path]):
            found.append(ConfigDifference(path=path, before=then[path], after=now[path], change="changed"))
    return found


def _same(before: JsonValue, after: JsonValue) -> bool:
    """True is not 1, but 1 is 1.0: YAML and JSON write numbers either way."""
    return before == after and isinstance(before, bool) == isinstance(after, bool)


def _leaves(config: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    return ((path, value) for path, value, _ in _walk(config) if not (isinstance(value, dict | list) and value))


def _walk(value: JsonValue, path: str = "", depth: int = 0) -> Iterator[tuple[str, JsonValue, int]]:
    """Every value below, with its path and its depth. It never goes deeper than a request may."""
    if path:
        yield path, value, depth
    if depth > DEEPEST_CONFIG:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, f"{path}.{key}" if path else key or '""', depth + 1)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _walk(each, f"{path}[{number}]", depth + 1)


class OpenAttempt(Request):
    model_config = example(
        {
            "launch_id": "slurm-81723",
            "after": 2,
            "world_size": 8,
            "host": "node-17",
            "environment": {"torch": "2.13.0"},
        }
    )

    largest_body_bytes: ClassVar[int] = 2 * MOST_CONFIG_BYTES

    launch_id: LaunchId = Field(description="One per launch: the same launch_id gets the same attempt back.")
    after: int = Field(ge=0, description="The newest attempt that this launch knows of; compare-and-swap.")
    world_size: int = Field(ge=1, le=100_000)
    host: str = Field(default="", max_length=255)
    environment: Environment = Field(
        default_factory=dict,
        description="Versions and hardware, for people. `hosts`, in Slurm's notation, are those of all ranks.",
    )
    create: bool | None = Field(
        default=None,
        description="True: make project and run if they do not exist. False: refuse. None: make the run, unless its "
        "name looks like a mistyped one of a run that has checkpoints.",
    )
    rolls_back: int | None = Field(
        default=None,
        ge=1,
        json_schema_extra=since(3),
        description="The attempt that this job leaves, to go back to an older checkpoint; null: a launch.",
    )
    config: Config | None = Field(
        default=None,
        json_schema_extra=since(8),
        description="What the job was told to train: any JSON map. It must hold no secrets.",
    )


class AttemptOpened(RestoreDecision):
    """The new attempt, and the restore point that the service has chosen for it."""

    attempt: int
    epoch: int
    run_id: str
    components: list[str] = Field(
        default_factory=list,
        description="The components of the run's first checkpoint, by name: later ones should have them.",
    )
    save_interval_seconds: float = Field(description="The time between two saves, until a heartbeat's reply says more.")
    heartbeat_interval_seconds: float


class Notice(Request):
    """Why a job was told to leave: the source, and how long it had."""

    source: str = Field(max_length=100, description="Such as `SIGTERM`, `aws`, `gcp`, `azure`.")
    reason: str = Field(default="", max_length=1000)
    deadline_seconds: float | None = Field(default=None, ge=0, description="From the notice on; null: unknown.")


class NoticeView(Reply):
    source: str
    reason: str = ""
    deadline_seconds: float | None = None


class AttemptView(Reply):
    number: int
    launch_id: str
    world_size: int
    host: str
    environment: dict[str, str] = Field(description="Left out of lists.")
    opened_at: datetime
    heartbeat_at: datetime | None = Field(
        description="Its last sign: a heartbeat, a call of a save, its end; null: none since it was opened."
    )
    first_step: int | None = Field(default=None, description="The first step that it ran.")
    first_step_at: datetime | None = Field(default=None, description="When that step ended.")
    last_step: int | None = Field(description="The last step that it reported, or began a save of.")
    steps_run: int | None = Field(
        default=None, description="By its report. Steps that it repeated after a rollback count again."
    )
    steps_per_second: float | None = Field(default=None, description="Lately, without saves and restores.")
    doing: Doing | None = None
    progressed_at: datetime | None = Field(default=None, description="The last sign of its training thread.")
    stalled_at: datetime | None = Field(default=None, description="It is alive, but has made no progress since then.")
    restore_seconds: float | None = Field(default=None, description="All its restores together.")
    saves_begun: int | None = None
    save_blocked_seconds: float | None = Field(
        default=None, description="How long its saves blocked training, on rank 0."
    )
    ended_at: datetime | None
    outcome: AttemptOutcome | None
    outcome_detail: str | None
    error_type: str | None = Field(default=None, description="The type of the exception that it crashed with.")
    error_rank: int | None = Field(default=None, description="The rank that reported it first.")
    notice: NoticeView | None = Field(default=None, description="The notice of its preemption.")
    refused_at: datetime | None = Field(
        default=None, description="It called after it was fenced, so it was still alive then."
    )
    resumed_from: str | None = Field(description="Checkpoint id.")
    skipped: list[Skipped] | None = Field(
        default=None,
        description="Why it began no later: the newer checkpoints that its opening skipped, the newest 20. "
        "Null: not known, or its own job went back.",
    )
    rolled_back_at: datetime | None = Field(
        default=None, description="When its own job left it, to go back to an older checkpoint."
    )


class ResumedFrom(Fence):
    """The checkpoint that the ranks have really loaded; the lineage follows it (rule latest-follows-lineage)."""

    model_config = example({"epoch": 1, "attempt": 3, "checkpoint_id": "ck_5f0c7d9f1f4b4c0f9f0e0a3d0b8a6e21"})

    checkpoint_id: str | None
    rollback: bool = Field(default=False, description="True cuts the lineage here: later checkpoints are never latest.")


class ProgressReport(Fence):
    """An attempt's report on itself, from one rank. Sums are of this attempt, ages by the job's own clock; null is
    unknown. The service's clock turns an age into a moment."""

    largest_body_bytes: ClassVar[int] = 128 * 1024

    step: int | None = Field(default=None, ge=0, le=LARGEST_INTEGER, description="The last step that ran.")
    first_step: int | None = Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(3))
    steps_run: int | None = Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(3))
    first_step_age_seconds: float | None = Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(3))
    progress_age_seconds: float | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INTEGER,
        json_schema_extra=since(3),
        description="How long ago the training thread ended a step, a save or a restore.",
    )
    steps_per_second: float | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INTEGER,
        json_schema_extra=since(3),
        description="Since the last heartbeat, without saves and restores.",
    )
    restore_seconds: float | None = Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(3))
    saves_begun: int | None = Field(default=None, ge=0, le=2**31 - 1, json_schema_extra=since(3))
    save_blocked_seconds: float | None = Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(3))
    doing: Doing | None = Field(default=None, json_schema_extra=since(3))
    metrics: ToldMetrics = Field(
        default_factory=dict,
        json_schema_extra=since(9),
        description="What was measured since the last report that was answered: points of the run's curves, by metric. "
        "A point that is there already stays as it is.",
    )


class Heartbeat(ProgressReport):
    model_config = example(
        {
            "epoch": 1,
            "attempt": 3,
            "step": 1234,
            "first_step": 1201,
            "steps_run": 34,
            "steps_per_second": 1.6,
            "doing": "training",
            "metrics": {"loss": [[1233, 2.31], [1234, 2.29]], "grad_norm": [[1234, "inf"]]},
        }
    )


class HeartbeatReply(Reply):
    save_interval_seconds: float
    metrics_left_out: list[str] = Field(
        default_factory=list, description="Metrics that get no curve, because the run has as many as it may have."
    )


class EndAttempt(ProgressReport):
    """From rank 0, or, if it is `failed`, from the rank that met the error. The first report counts."""

    model_config = example({"epoch": 1, "attempt": 3, "outcome": "finished"})

    step: int | None = Field(default=None, ge=0, le=LARGEST_INTEGER, json_schema_extra=since(3))
    outcome: AttemptOutcome
    detail: str = Field(default="", max_length=4000)
    error_type: str | None = Field(default=None, max_length=200, json_schema_extra=since(3))
    error_rank: int | None = Field(default=None, ge=0, le=100_000, json_schema_extra=since(3))
    notice: Notice | None = Field(default=None, json_schema_extra=since(3))
