"""Retention: plans, prunes, the trash, pins, holds and policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from holdfast_client.errors import PolicyNotFound
from holdfast_client.resources.base import PLANS_SECONDS, Resource, all_items, if_match, once
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.policies.policy import PolicyKind, PolicyView, PutPolicy
from holdfast_protocol.pruning import (
    MAX_AT_ONCE,
    ApplyRetention,
    ExtendHold,
    HoldView,
    PlaceHold,
    PlanRetention,
    PruneCheckpoints,
    Pruned,
    ReleaseHold,
    RetentionPlan,
)


def _portions(checkpoint_ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(checkpoint_ids), MAX_AT_ONCE):
        yield list(checkpoint_ids[start : start + MAX_AT_ONCE])


def _route(kind: PolicyKind, project: str, run: str | None) -> str:
    if run is None:
        return path("projects", project, "policies", kind.value)
    return path("projects", project, "runs", run, "policies", kind.value)


class Retention(Resource):
    """Plans and prunes. See holdfast_protocol.pruning."""

    def plan(
        self,
        project: str,
        run: str,
        *,
        policy: Mapping[str, Any] | None = None,
        show: Literal["all", "keep", "expire", "none"] = "all",
    ) -> RetentionPlan:
        """Which checkpoints stay and which expire, each with every reason. `policy`: a plan for this policy instead of
        the run's; it cannot be applied. Changes nothing."""
        request = PlanRetention(policy=None if policy is None else dict(policy), show=show)
        return self.transport.call(
            "POST",
            path("projects", project, "runs", run, "retention", "plan"),
            RetentionPlan,
            body=request,
            waits_seconds=PLANS_SECONDS,
        )

    def apply(self, plan: RetentionPlan) -> Iterator[Pruned]:
        """Expires the checkpoints that the plan showed as expiring, in portions; one result for each as it is done.
        `plan` must list them (`show` is all or expire). Idempotent. Raises PolicyChanged if the policy has changed
        since."""
        shown = [each.checkpoint_id for each in plan.checkpoints if not each.keep]
        for some in _portions(shown):
            request = ApplyRetention(policy_digest=plan.policy_digest or "none", checkpoint_ids=some)
            yield self.transport.call(
                "POST",
                path("projects", plan.project, "runs", plan.run, "retention", "apply"),
                Pruned,
                body=request,
                waits_seconds=PLANS_SECONDS,
            )

    def prune(self, project: str, run: str, request: PruneCheckpoints) -> Pruned:
        """Moves checkpoints to the trash. Raises CheckpointHeld or CheckpointProtected if a named one must stay; the
        filter skips such checkpoints."""
        return self.transport.call(
            "POST",
            path("projects", project, "runs", run, "retention", "prune"),
            Pruned,
            body=request,
            waits_seconds=PLANS_SECONDS,
        )


class Holds(Resource):
    """See holdfast_protocol.pruning."""

    def create(self, checkpoint_id: str, request: PlaceHold) -> HoldView:
        """No policy and no person can delete the checkpoint until another token releases the hold, or it ends. The same
        call again returns the hold in force."""
        return self.transport.call(
            "POST", path("checkpoints", checkpoint_id, "holds"), HoldView, body=request, headers=once()
        )

    def list_on(
        self, checkpoint_id: str, *, over: bool = False, cursor: str | None = None, limit: int | None = None
    ) -> Page[HoldView]:
        """One page of a checkpoint's holds; `over`: also those that are released or have ended."""
        return self.transport.call(
            "GET",
            path("checkpoints", checkpoint_id, "holds"),
            Page[HoldView],
            params={"over": over, "cursor": cursor, "limit": limit},
        )

    def list(
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

    def all(self, *, project: str | None = None, run: str | None = None, over: bool = False) -> Iterator[HoldView]:
        return all_items(lambda cursor: self.list(project=project, run=run, over=over, cursor=cursor))

    def all_on(self, checkpoint_id: str, *, over: bool = False) -> Iterator[HoldView]:
        return all_items(lambda cursor: self.list_on(checkpoint_id, over=over, cursor=cursor))

    def extend(self, hold_id: str, request: ExtendHold) -> HoldView:
        """Moves the end of a hold further away."""
        return self.transport.call("PATCH", path("holds", hold_id), HoldView, body=request)

    def release(self, hold_id: str, request: ReleaseHold) -> HoldView:
        """Needs another person's token: not the one that placed it, nor one that it has made or was made by."""
        return self.transport.call("POST", path("holds", hold_id, "release"), HoldView, body=request)


class Policies(Resource):
    """See holdfast_protocol.policies.policy."""

    def get(self, kind: PolicyKind, project: str, run: str | None = None) -> PolicyView:
        """The policy in force; a run's own or its project's, which `level` tells. Raises PolicyNotFound."""
        return self.transport.call("GET", _route(kind, project, run), PolicyView)

    def put(
        self,
        kind: PolicyKind,
        project: str,
        run: str | None,
        document: Mapping[str, Any],
        *,
        etag: str | None = None,
    ) -> PolicyView:
        """Puts the first policy, or replaces the one that `etag` was read from. Raises InvalidRequest for a document
        that is no policy, and EditConflict if another was put in between."""
        request = PutPolicy(document=dict(document))
        return self.transport.call("PUT", _route(kind, project, run), PolicyView, body=request, headers=if_match(etag))

    def delete(self, kind: PolicyKind, project: str, run: str | None = None, *, etag: str) -> PolicyView | None:
        """Deletes the target's own policy, as `etag` was read from it, and returns it. None: an earlier try of this
        call has deleted it, and its reply was lost. Raises PolicyNotFound if there is none."""
        try:
            return self.transport.call("DELETE", _route(kind, project, run), PolicyView, headers=if_match(etag))
        except PolicyNotFound as gone:
            if gone.earlier_try_ambiguous:
                return None
            raise
