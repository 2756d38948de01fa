"""Retention plans, and what people delete, take back, pin and hold.

`POST   /v1/projects/{project}/runs/{run}/retention/plan`    PlanRetention      -> RetentionPlan
`POST   /v1/projects/{project}/runs/{run}/retention/apply`   ApplyRetention     -> Pruned
`POST   /v1/projects/{project}/runs/{run}/retention/prune`   PruneCheckpoints   -> Pruned
`POST   /v1/checkpoints/{id}/undelete`                       UndeleteCheckpoint -> CheckpointView
`PUT    /v1/checkpoints/{id}/pin`                            PinCheckpoint      -> CheckpointView   (If-Match)
`DELETE /v1/checkpoints/{id}/pin`                                               -> CheckpointView   (If-Match)
`DELETE /v1/projects/{project}/runs/{run}`  (If-Match)       DeleteAll          -> Deletion
`POST   /v1/projects/{project}/runs/{run}/undelete`                             -> TakenBack
`DELETE /v1/projects/{project}`             (If-Match)       DeleteAll          -> Deletion
`POST   /v1/projects/{project}/undelete`                                        -> TakenBack
`GET    /v1/projects/{project}/runs?deleted=true`, `GET /v1/projects?deleted=true`: the trash
`POST   /v1/checkpoints/{id}/holds`     PlaceHold    -> HoldView   (repeated by the same token: the one in force)
`GET    /v1/checkpoints/{id}/holds`                  -> Page[HoldView]
`GET    /v1/holds`                      filters      -> Page[HoldView]
`PATCH  /v1/holds/{id}`                 ExtendHold   -> HoldView
`POST   /v1/holds/{id}/release`         ReleaseHold  -> HoldView

Deleted checkpoints are in the trash first, and can be taken back until their purge begins (rule trash-first). A dry run
changes nothing and gives the ETag of the version that it saw; the deletion names that one, or `*`. No token can delete
a held checkpoint until a token of another person releases the hold.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from holdfast_protocol.base import Label, Reply, Request, example
from holdfast_protocol.checkpoints import Step
from holdfast_protocol.policies.policy import PolicyView
from holdfast_protocol.policies.retention import Reason
from holdfast_protocol.states import CheckpointState, Health

MAX_AT_ONCE = 2000
"""Checkpoints that one call moves to the trash, under one lock; a client sends more in portions."""
MAX_SECONDS = 100 * 366 * 86400

CheckpointId = Annotated[str, StringConstraints(pattern=r"^ck_[0-9a-f]{32}$")]
Why = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class PlanRetention(Request):
    model_config = example({"policy": {"keep_last": 3}, "show": "expire"})

    policy: dict[str, Any] | None = Field(
        default=None, description="The policy to try; null: the one in force. Only a plan of that one can be applied."
    )
    show: Literal["all", "keep", "expire", "none"] = Field(
        default="all", description="Which checkpoints are listed. The figures are those of all of them."
    )


class FreedBytes(Reply):
    """The bytes that the stores would lose, once the listed checkpoints are purged and collected. Net of sharing: only
    chunks that no remaining checkpoint needs, in this run or another of the project. Checkpoints in the trash do not
    count as remaining, unless they are held or pinned."""

    bytes: int = Field(description="Bytes as stored, in all stores.")
    by_store: dict[str, int] = Field(default_factory=dict, description="The same by the stores' URLs.")


class PlannedCheckpoint(Reply):
    checkpoint_id: str
    step: int
    attempt: int
    at: datetime = Field(description="When it was committed; of an uploading one, when it was begun.")
    state: CheckpointState
    health: Health
    labels: list[str]
    logical_bytes: int
    keep: bool
    reasons: list[Reason] = Field(description="Every one.")


class RetentionPlan(Reply):
    project: str
    run: str
    policy: PolicyView | None = Field(description="The policy in force; null: none.")
    policy_digest: str | None = Field(description="For `apply`; null if there is nothing to apply.")
    rules: dict[str, Any] | None = Field(description="The rules that the plan was made by.")
    planned_at: datetime
    kept: int
    expired: int
    freed: FreedBytes
    notes: list[str] = Field(description="Remarks for people on this plan.")
    checkpoints: list[PlannedCheckpoint] = Field(description="The newest first.")


class ApplyRetention(Request):
    """Expires the shown checkpoints, if the state under the run's lock allows it too (rule apply-what-was-shown)."""

    model_config = example(
        {"policy_digest": "4f1d0c9a2b7e6835", "checkpoint_ids": ["ck_5f0c7d9f1f4b4c0f9f0e0a3d0b8a6e21"]}
    )

    largest_body_bytes: ClassVar[int] = 256 * 1024  # MAX_AT_ONCE ids are 80 KiB

    policy_digest: str = Field(min_length=1, max_length=100, description="The shown plan's.")
    checkpoint_ids: list[CheckpointId] = Field(
        max_length=MAX_AT_ONCE, description="The shown plan's expiring checkpoints."
    )


class PruneFilter(Request):
    """A checkpoint matches if it meets every given condition."""

    before_step: Step | None = Field(default=None, description="Steps below this one.")
    from_step: Step | None = Field(default=None, description="Steps from this one on.")
    labels: list[Label] = Field(default_factory=list, max_length=50, description="It has one of these.")
    health: list[Health] = Field(default_factory=list, description="It has one of these.")
    older_than_seconds: int | None = Field(default=None, ge=0, le=MAX_SECONDS, description="Committed longer ago.")
    attempt: int | None = Field(default=None, ge=1, le=2**31 - 1)


class PruneCheckpoints(Request):
    """A person's deletion. With a filter, protected checkpoints are left out and reported; of ids without a filter all
    are deleted, or none."""

    model_config = example({"filter": {"before_step": 5000, "health": ["diverged"]}, "reason": "loss spikes"})

    largest_body_bytes: ClassVar[int] = 256 * 1024  # MAX_AT_ONCE ids are 80 KiB

    filter: PruneFilter | None = None
    checkpoint_ids: list[CheckpointId] | None = Field(
        default=None, max_length=MAX_AT_ONCE, description="Only these; with a filter, the shown ones."
    )
    reason: str = Field(default="", max_length=1000, description="For readers of the audit events.")
    all_of_run: bool = Field(
        default=False,
        description="Also the last two healthy points: only of a run without an active attempt.",
    )
    dry_run: bool = False


class PrunedCheckpoint(Reply):
    checkpoint_id: str
    step: int
    attempt: int
    health: Health
    logical_bytes: int


class LeftCheckpoint(Reply):
    """A requested checkpoint that stays, for each of these reasons."""

    checkpoint_id: str
    step: int
    attempt: int
    reasons: list[Reason]


class Pruned(Reply):
    dry_run: bool = False
    trashed: list[PrunedCheckpoint] = Field(description="In the trash now; in a dry run, what would be there.")
    left: list[LeftCheckpoint] = Field(description="The checkpoints that stay, and why.")
    purge_at: datetime | None = Field(
        description="Until when they can be taken back, in a dry run if they went now; null if none goes. What a "
        "policy expired goes before that while a disk or the quota is short."
    )
    freed: FreedBytes
    more: bool = Field(default=False, description="Not all are done: call again.")


class UndeleteCheckpoint(Request):
    model_config = example({"pin": True})

    pin: bool | None = Field(
        default=None,
        description="Keep it from expiring again. Null: for a while, if a policy had expired it.",
    )


class PinCheckpoint(Request):
    model_config = example({"reason": "figure 3 of the paper", "expires_in_seconds": 7776000})

    reason: Why = Field(description="Shown to people who find it kept.")
    expires_in_seconds: int | None = Field(
        default=None, ge=1, le=MAX_SECONDS, description="Null: until it is unpinned."
    )


class DeleteAll(Request):
    model_config = example({"reason": "a failed idea"})

    reason: str = Field(default="", max_length=1000, description="For readers of the audit events.")
    dry_run: bool = False


class InTrash(Reply):
    """Who deleted it, and until when it can be taken back."""

    deleted_at: datetime
    deleted_by: str
    reason: str | None
    purge_at: datetime = Field(description="When it is purged, once no checkpoint in it is held, pinned or read.")


class Deletion(Reply):
    """`run` null: a project, whose runs are all deleted."""

    project: str
    run: str | None = None
    dry_run: bool
    etag: str = Field(description="The version that was seen; for If-Match.")
    checkpoints: int = Field(description="Committed checkpoints that go to the trash.")
    logical_bytes: int = Field(description="Bytes of their states.")
    freed: FreedBytes
    in_trash: InTrash | None = Field(description="Null in a dry run, if it is not deleted yet.")


class TakenBack(Reply):
    project: str
    run: str | None = None
    checkpoints: int = Field(description="Checkpoints that are committed again.")
    purged: int = Field(description="Checkpoints whose purge had begun: they stay deleted.")


class HoldKind(StrEnum):
    LEGAL = "legal"
    """In force until it is released."""
    RETAIN_UNTIL = "retain_until"
    """In force until a point in time, which can only be moved further away, or until it is released."""


class PlaceHold(Request):
    model_config = example({"reason": "evidence for the audit of 2026", "retain_until": "2033-12-31T00:00:00Z"})

    reason: str = Field(min_length=1, max_length=1000, description="Shown to people whose deletion it refuses.")
    retain_until: AwareDatetime | None = Field(
        default=None, description="The end of the hold, by the database's clock; null: until it is released."
    )
    mirror: bool = Field(
        default=False, description="Also by the store's Object Lock, on each copy of each chunk; S3 only."
    )


class ExtendHold(Request):
    model_config = example({"retain_until": "2036-12-31T00:00:00Z"})

    retain_until: AwareDatetime = Field(description="Later than it is now: a hold is never shortened.")


class ReleaseHold(Request):
    model_config = example({"reason": "the audit is closed"})

    reason: str = Field(min_length=1, max_length=1000)


class HoldView(Reply):
    id: str
    checkpoint_id: str
    project: str
    run: str
    step: int
    attempt: int
    kind: HoldKind
    reason: str
    retain_until: datetime | None
    in_force: bool
    mirror: bool
    mirrored_at: datetime | None = Field(
        description="Since when every copy in stores with Object Lock is locked; null: some are not, or it has ended."
    )
    mirror_error: str | None = Field(description="Why the store did not lock a copy; it is tried again.")
    placed_at: datetime
    placed_by: str = Field(description="The name of the token.")
    released_at: datetime | None
    released_by: str | None
    release_reason: str | None
