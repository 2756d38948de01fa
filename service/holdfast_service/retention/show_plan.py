"""The plan for people: keep or expire, with every reason, and the bytes that would go. It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_protocol.counted import counted
from holdfast_protocol.policies import PolicyError, PolicyKind, PolicyView, read_policy
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import PlannedCheckpoint, PlanRetention, RetentionPlan
from holdfast_protocol.retention import RetentionPolicy
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.policies import StoredPolicy, effective_policy
from holdfast_service.catalog.resolve import run_named
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.retention.freed import freed_bytes
from holdfast_service.retention.plan import Decision, make_plan, only_for_want_of_a_metric, policy_digest
from holdfast_service.retention.read_facts import read_facts


def show_plan(
    context: ServiceContext, caller: Principal, project: str, run: str, request: PlanRetention
) -> RetentionPlan:
    """Raises `forbidden`, `project_not_found`, `run_not_found`, and `invalid_request` for what is no policy."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        stored = effective_policy(session, PolicyKind.RETENTION, owner.id, found.id)
        rules = _rules(stored, request.policy)
        decisions = make_plan(rules, read_facts(session, found, rules))
        expiring = [each.fact.id for each in decisions if not each.keep]
        return RetentionPlan(
            project=owner.name,
            run=found.name,
            policy=None if stored is None else _view(stored, owner.name, found.name),
            # What was only asked about cannot be applied.
            policy_digest=policy_digest(stored) if stored is not None and request.policy is None else None,
            rules=None if rules is None else rules.rules(),
            planned_at=database_now(session),
            kept=len(decisions) - len(expiring),
            expired=len(expiring),
            freed=freed_bytes(session, expiring),
            notes=_notes(rules, decisions),
            checkpoints=_shown(decisions, request.show),
        )


def stored_rules(stored: StoredPolicy) -> RetentionPolicy:
    """Raises PolicyError for what a newer version has put: then nothing may be done by it."""
    rules = read_policy(PolicyKind.RETENTION, stored.document)
    assert isinstance(rules, RetentionPolicy)
    return rules


def _rules(stored: StoredPolicy | None, asked: dict[str, Any] | None) -> RetentionPolicy | None:
    try:
        if asked is None:
            return None if stored is None else stored_rules(stored)
        rules = read_policy(PolicyKind.RETENTION, asked)
    except PolicyError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{error} Correct the policy.") from None
    assert isinstance(rules, RetentionPolicy)
    return rules


def _shown(decisions: Sequence[Decision], show: str) -> list[PlannedCheckpoint]:
    wanted = {"all": (True, False), "keep": (True,), "expire": (False,), "none": ()}[show]
    # Made of the catalog's own values: they need no second look, and there may be a hundred thousand.
    return [
        PlannedCheckpoint.model_construct(
            checkpoint_id=each.fact.id,
            step=each.fact.step,
            attempt=each.fact.attempt,
            at=each.fact.at,
            state=each.fact.state,
            health=each.fact.health,
            labels=list(each.fact.labels),
            logical_bytes=each.fact.logical_bytes,
            keep=each.keep,
            reasons=list(each.reasons),
        )
        for each in decisions
        if each.keep in wanted
    ]


def _notes(rules: RetentionPolicy | None, decisions: Sequence[Decision]) -> list[str]:
    if rules is None:
        return ["There is no retention policy for this run, so nothing ever expires."]
    notes = []
    if unjudged := only_for_want_of_a_metric(decisions):
        metrics = ", ".join(sorted({best.metric for best in rules.keep_best}))
        notes.append(
            f"{unjudged} of {counted(len(decisions), 'checkpoint')} stay only because they have no finite value of "
            f"{metrics}. "
            "Report the metric at every save, or prune them yourself."
        )
    return notes


def _view(policy: StoredPolicy, project: str, run: str) -> PolicyView:
    return PolicyView(
        kind=policy.kind,
        project=project,
        run=run if policy.level == "run" else None,
        level=policy.level,
        document=policy.document,
        version=policy.version,
        etag=policy.etag,
        updated_at=policy.updated_at,
        updated_by=policy.updated_by,
    )
