"""What stays: plans, prunes, the trash, pins, holds and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from holdfast_client.resources.base import Operations, all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.policies import PolicyKind, PolicyView, PutPolicy
from holdfast_protocol.pruning import (
    MAX_AT_ONCE,
    ApplyRetention,
    DeleteAll,
    Deletion,
    ExtendHold,
    HoldView,
    PinCheckpoint,
    PlaceHold,
    PlanRetention,
    PruneCheckpoints,
    Pruned,
    ReleaseHold,
    RetentionPlan,
    TakenBack,
    UndeleteCheckpoint,
)

# Plan and apply retention, prune, take back from the trash, pin. See holdfast_protocol.pruning.

# A run of 100,000 checkpoints takes the service many seconds to think over.
_THINKS_SECONDS = 300


class RetentionOperations(Operations):
    def plan_retention(
        self,
        project: str,
        run: str,
        *,
        policy: Mapping[str, Any] | None = None,
        show: Literal["all", "keep", "expire", "none"] = "all",
    ) -> RetentionPlan:
        """Which checkpoints stay and which expire, each with every reason. `policy` asks what if that
        were the run's; such a plan cannot be applied. Changes nothing."""
        request = PlanRetention(policy=None if policy is None else dict(policy), show=show)
        return self.transport.call(
            "POST",
            path("projects", project, "runs", run, "retention", "plan"),
            RetentionPlan,
            body=request,
            waits_seconds=_THINKS_SECONDS,
        )

    def apply_retention(self, plan: RetentionPlan) -> Iterator[Pruned]:
        """Expires what the plan was seen to expire, in portions; one result for each as it is done. `plan` lists what
        expires (`show` is all or expire). Twice is fine. Raises PolicyChanged if the policy is another by now."""
        shown = [each.checkpoint_id for each in plan.checkpoints if not each.keep]
        for some in _portions(shown):
            request = ApplyRetention(policy_digest=plan.policy_digest or "none", checkpoint_ids=some)
            yield self.transport.call(
                "POST",
                path("projects", plan.project, "runs", plan.run, "retention", "apply"),
                Pruned,
                body=request,
                waits_seconds=_THINKS_SECONDS,
            )

    def prune(self, project: str, run: str, request: PruneCheckpoints) -> Pruned:
        """Moves checkpoints to the trash. Raises CheckpointHeld or CheckpointProtected where one that was named, and
        not found by a filter, must stay."""
        return self.transport.call(
            "POST",
            path("projects", project, "runs", run, "prune"),
            Pruned,
            body=request,
            waits_seconds=_THINKS_SECONDS,
        )

    def undelete(self, checkpoint_id: str, *, pin: bool | None = None) -> CheckpointView:
        """Takes a checkpoint back from the trash. `pin` None: what a policy had expired is pinned for a while, or it
        would expire again. Raises ChunkGone once its purge has begun."""
        return self.transport.call(
            "POST", path("checkpoints", checkpoint_id, "undelete"), CheckpointView, body=UndeleteCheckpoint(pin=pin)
        )

    def delete_run(
        self, project: str, run: str, *, reason: str = "", dry_run: bool = False, etag: str | None = None
    ) -> Deletion:
        """Moves all of a run to the trash. `etag`: of the dry run that was seen, or `*`. Raises CheckpointHeld and
        CheckpointProtected for what must stay, EditNeedsVersion and EditConflict."""
        return self._delete(path("projects", project, "runs", run), reason, dry_run, etag)

    def delete_project(
        self, project: str, *, reason: str = "", dry_run: bool = False, etag: str | None = None
    ) -> Deletion:
        """Deletes a project whose runs are all deleted. Raises CheckpointProtected while one is not."""
        return self._delete(path("projects", project), reason, dry_run, etag)

    def undelete_run(self, project: str, run: str) -> TakenBack:
        """Takes a run back, with what of it is not being purged yet. Raises RunNotFound once it is purged."""
        return self.transport.call(
            "POST", path("projects", project, "runs", run, "undelete"), TakenBack, waits_seconds=_THINKS_SECONDS
        )

    def undelete_project(self, project: str) -> TakenBack:
        """Takes a project back, without its runs. Raises ProjectNotFound once it is purged."""
        return self.transport.call("POST", path("projects", project, "undelete"), TakenBack)

    def _delete(self, route: str, reason: str, dry_run: bool, etag: str | None) -> Deletion:
        return self.transport.call(
            "DELETE",
            route,
            Deletion,
            body=DeleteAll(reason=reason, dry_run=dry_run),
            headers=None if etag is None else {"If-Match": etag},
            waits_seconds=_THINKS_SECONDS,
        )

    def pin(self, checkpoint_id: str, reason: str, *, expires_in_seconds: int | None = None) -> CheckpointView:
        """Keeps a checkpoint from every policy and everybody's prune, for ever or for so long."""
        request = PinCheckpoint(reason=reason, expires_in_seconds=expires_in_seconds)
        return self.transport.call("PUT", path("checkpoints", checkpoint_id, "pin"), CheckpointView, body=request)

    def unpin(self, checkpoint_id: str) -> CheckpointView:
        """Takes the pin away; one that has none is left as it is."""
        return self.transport.call("DELETE", path("checkpoints", checkpoint_id, "pin"), CheckpointView)


def _portions(checkpoint_ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(checkpoint_ids), MAX_AT_ONCE):
        yield list(checkpoint_ids[start : start + MAX_AT_ONCE])


# Holds on checkpoints. See holdfast_protocol.pruning.


class HoldOperations(Operations):
    def place_hold(self, checkpoint_id: str, request: PlaceHold) -> HoldView:
        """Nobody takes the checkpoint away until another token releases the hold, or it ends. The same again gives the
        hold that is in force."""
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "holds"), HoldView, body=request)

    def holds_on(
        self, checkpoint_id: str, *, over: bool = False, cursor: str | None = None, limit: int | None = None
    ) -> Page[HoldView]:
        """One page of a checkpoint's holds; `over`: also those that are released or have ended."""
        return self.transport.call(
            "GET",
            path("checkpoints", checkpoint_id, "holds"),
            Page[HoldView],
            params={"over": over, "cursor": cursor, "limit": limit},
        )

    def holds(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        over: bool = False,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[HoldView]:
        """One page of the holds that the token may see, the newest first."""
        return self.transport.call(
            "GET",
            path("holds"),
            Page[HoldView],
            params={"project": project, "run": run, "over": over, "cursor": cursor, "limit": limit},
        )

    def all_holds(
        self, *, project: str | None = None, run: str | None = None, over: bool = False
    ) -> Iterator[HoldView]:
        return all_items(lambda cursor: self.holds(project=project, run=run, over=over, cursor=cursor))

    def all_holds_on(self, checkpoint_id: str, *, over: bool = False) -> Iterator[HoldView]:
        return all_items(lambda cursor: self.holds_on(checkpoint_id, over=over, cursor=cursor))

    def extend_hold(self, hold_id: str, request: ExtendHold) -> HoldView:
        """Moves the end of a hold further away."""
        return self.transport.call("PATCH", path("holds", hold_id), HoldView, body=request)

    def release_hold(self, hold_id: str, request: ReleaseHold) -> HoldView:
        """Only by another person's token: not by the one that placed it, nor by one that it has made or was made by."""
        return self.transport.call("POST", path("holds", hold_id, "release"), HoldView, body=request)


# Put, show and delete policies of any kind. See holdfast_protocol.policies.


class PolicyOperations(Operations):
    """`run` None: the project's policy."""

    def policy(self, kind: PolicyKind, project: str, run: str | None = None) -> PolicyView:
        """The policy that holds; of a run its own or its project's, which `level` tells. Raises PolicyNotFound."""
        return self.transport.call("GET", _route(kind, project, run), PolicyView)

    def put_policy(
        self,
        kind: PolicyKind,
        project: str,
        run: str | None,
        document: Mapping[str, Any],
        *,
        etag: str | None = None,
    ) -> PolicyView:
        """Puts the first policy, or replaces the one that `etag` was read from. Raises InvalidRequest for what is no
        policy, and EditConflict if another was put in between."""
        request = PutPolicy(document=dict(document))
        return self.transport.call("PUT", _route(kind, project, run), PolicyView, body=request, headers=_match(etag))

    def delete_policy(self, kind: PolicyKind, project: str, run: str | None = None, *, etag: str) -> PolicyView:
        """Deletes the target's own policy, as `etag` was read from it, and gives back what it was."""
        return self.transport.call("DELETE", _route(kind, project, run), PolicyView, headers=_match(etag))


def _route(kind: PolicyKind, project: str, run: str | None) -> str:
    if run is None:
        return path("projects", project, "policies", kind.value)
    return path("projects", project, "runs", run, "policies", kind.value)


def _match(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"If-Match": etag}
