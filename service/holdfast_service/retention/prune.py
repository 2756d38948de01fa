"""What was shown, or what a person names, goes to the trash; the answer says what stays and why.

A person deletes one checkpoint or many: by their ids, by a filter, or by what of a filter's result was shown. What must
stay (held, pinned, being read, what a running attempt stands on, the restore point, the two newest healthy points) is
refused by name and with every reason. If checkpoints are only named, any that must stay refuses the whole call; if a
filter chose them, the others go. `all_of_run` lets the last points go too, of a run without an active attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.policies.policy import PolicyError, PolicyKind
from holdfast_protocol.policies.retention import Reason, ReasonKind
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import MAX_AT_ONCE, ApplyRetention, PruneCheckpoints, Pruned, PruneFilter
from holdfast_protocol.states import CheckpointState
from holdfast_service.audit.record import Actor
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Run
from holdfast_service.errors import ProblemError
from holdfast_service.policies.policies import StoredPolicy, effective_policy
from holdfast_service.retention.plan import (
    FOR_THE_RUN_TO_GO_ON,
    Decision,
    Fact,
    RunFacts,
    make_plan,
    newest_first,
    policy_digest,
    protected,
)
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.show_plan import freed_of, left_views, pruned_views, stored_rules, when
from holdfast_service.retention.trash import Trashing, lock_run, move_to_trash
from holdfast_service.runs.views import run_named

_SHOWN = 20
_IN_TRASH = (CheckpointState.TRASHED, CheckpointState.DELETING, CheckpointState.DELETED)


def prune(context: ServiceContext, caller: Principal, project: str, run: str, request: PruneCheckpoints) -> Pruned:
    """Raises `checkpoint_held` and `checkpoint_protected` for what was named and must stay, `checkpoint_not_found`,
    `checkpoint_conflict` for what is not complete, `invalid_request`, and what finding the run raises."""
    if request.filter is None and request.checkpoint_ids is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST, "Nothing says what to delete. Give checkpoint_ids, or a filter, or both."
        )
    block = context.database.read if request.dry_run else context.database.transaction
    with block() as session:
        _, found = run_named(session, caller, project, run)
        if not request.dry_run:
            found = lock_run(session, found.id)
        facts = read_facts(session, found, None)
        chosen = _chosen(session, found, facts, request)
        stays = _must_stay(facts, request)
        may_go = [fact for fact in chosen if fact.id not in stays]
        more = len(may_go) > MAX_AT_ONCE and not request.dry_run
        if not request.dry_run:
            may_go = may_go[:MAX_AT_ONCE]
        left = [fact for fact in chosen if fact.id in stays]
        if left and request.filter is None:
            raise refusal(left, stays)
        trashing = Trashing.by_person(context, Actor.person(caller), request.reason)
        purge_at = database_now(session) + trashing.keep_for
        if not request.dry_run:
            gone, purge_at = move_to_trash(session, found, may_go, trashing)
            left += [fact for fact in may_go if fact.id not in gone]
            may_go = [fact for fact in may_go if fact.id in gone]
    return Pruned(
        dry_run=request.dry_run,
        trashed=pruned_views(may_go),
        left=left_views(left, stays),
        purge_at=when(purge_at, may_go),
        freed=freed_of(context, may_go),
        more=more,
    )


def _chosen(session: Session, run: Run, run_facts: RunFacts, request: PruneCheckpoints) -> list[Fact]:
    """Newest first; of those that were named each that is not in the trash already."""
    by_id = {fact.id: fact for fact in newest_first(run_facts.facts)}
    if request.filter is None:
        assert request.checkpoint_ids is not None
        _refuse_unknown(session, run, [one for one in request.checkpoint_ids if one not in by_id])
        named = set(request.checkpoint_ids)
        return [fact for fact in by_id.values() if fact.id in named]
    shown = None if request.checkpoint_ids is None else set(request.checkpoint_ids)
    before = None
    if request.filter.older_than_seconds is not None:
        before = database_now(session) - timedelta(seconds=request.filter.older_than_seconds)
    return [
        fact
        for fact in by_id.values()
        # A filter speaks of checkpoints, and what uploads is none yet.
        if fact.committed
        and (shown is None or fact.id in shown)
        and (before is None or fact.at < before)
        and _matches(request.filter, fact)
    ]


def _matches(wanted: PruneFilter, fact: Fact) -> bool:
    return (
        (wanted.before_step is None or fact.step < wanted.before_step)
        and (wanted.from_step is None or fact.step >= wanted.from_step)
        and (not wanted.labels or not set(wanted.labels).isdisjoint(fact.labels))
        and (not wanted.health or fact.health in wanted.health)
        and (wanted.attempt is None or fact.attempt == wanted.attempt)
    )


def _must_stay(run: RunFacts, request: PruneCheckpoints) -> dict[str, list[Reason]]:
    return stays_of_all(run) if request.all_of_run else protected(run)


def stays_of_all(run: RunFacts) -> dict[str, list[Reason]]:
    """What must stay even if all of the run is to go. Raises `checkpoint_protected` while an attempt is active."""
    if run.running:
        raise ProblemError(
            ProblemCode.CHECKPOINT_PROTECTED,
            "An attempt of this run is active, so not all of it can be deleted. End the job first, or delete only "
            "some of it (`holdfast checkpoints prune` without --all-of-run): then what it could resume from stays.",
        )
    kept = {
        checkpoint_id: [reason for reason in reasons if reason.kind not in FOR_THE_RUN_TO_GO_ON]
        for checkpoint_id, reasons in protected(run).items()
    }
    return {checkpoint_id: reasons for checkpoint_id, reasons in kept.items() if reasons}


def _refuse_unknown(session: Session, run: Run, checkpoint_ids: Sequence[str]) -> None:
    """What is in the trash already, or further, is fine: the call may be a repeated one."""
    found = {
        row.id: row
        for row in session.execute(
            select(Checkpoint.id, Checkpoint.step, Checkpoint.state).where(
                Checkpoint.run_id == run.id, Checkpoint.id.in_(checkpoint_ids)
            )
        )
    }
    for checkpoint_id in checkpoint_ids:
        row = found.get(checkpoint_id)
        if row is None:
            raise ProblemError(
                ProblemCode.CHECKPOINT_NOT_FOUND,
                f"This run has no checkpoint {checkpoint_id}. `holdfast checkpoints list` lists those that it has.",
                checkpoint_id=checkpoint_id,
            )
        if row.state not in _IN_TRASH:
            raise ProblemError(
                ProblemCode.CHECKPOINT_CONFLICT,
                f"Step {row.step} was {row.state} and is no checkpoint; there is nothing of it to delete.",
                checkpoint_id=checkpoint_id,
            )


def refusal(left: Sequence[Fact], stays: Mapping[str, Sequence[Reason]]) -> ProblemError:
    """Names what must stay, with every reason and what to do."""
    named = "; ".join(
        f"step {fact.step} of attempt {fact.attempt} ({', '.join(reason.detail for reason in stays[fact.id])})"
        for fact in left[:_SHOWN]
    )
    more = f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    kinds = {reason.kind for fact in left for reason in stays[fact.id]}
    held = ReasonKind.HELD in kinds
    remedy = (
        "A hold is released by another person than the one who placed it"
        if held
        else "Take the pin away, wait for its readers, or leave it out"
    )
    return ProblemError(
        ProblemCode.CHECKPOINT_HELD if held else ProblemCode.CHECKPOINT_PROTECTED,
        f"Nothing was deleted, for this must stay: {named}{more}. {remedy}.",
        checkpoints=[
            {
                "checkpoint_id": fact.id,
                "step": fact.step,
                "attempt": fact.attempt,
                "reasons": [{"kind": reason.kind.value, "detail": reason.detail} for reason in stays[fact.id]],
            }
            for fact in left[:_SHOWN]
        ],
        count=len(left),
    )


@dataclass(frozen=True)
class Applied:
    """`gone` went to the trash; `kept` were asked for and stay, with the plan's decision; of these `changed` had been
    allowed to go until their own lock was taken."""

    gone: list[Fact]
    kept: list[Decision]
    purge_at: datetime


def apply_plan(context: ServiceContext, caller: Principal, project: str, run: str, request: ApplyRetention) -> Pruned:
    """Applies a plan: expires what was shown and what the state under the run's lock allows too (rule
    apply-what-was-shown). Twice is fine: what is in the trash already is not asked about again.

    The plan is made anew under the lock. What it keeps by now (a pin, a reader, a label, another newest point) stays,
    whatever was shown; and what it would expire and was not shown stays until the next request. Only another policy
    refuses the whole: its reasons are not those that were read.

    Raises `policy_changed`, `forbidden`, `project_not_found` and `run_not_found`.
    """
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, project, run)
        found = lock_run(session, found.id)
        policy = effective_policy(session, PolicyKind.RETENTION, owner.id, found.id)
        if policy is None or policy_digest(policy) != request.policy_digest:
            raise _changed(project, run, policy)
        try:
            applied = expire_shown(session, context, found, policy, request.checkpoint_ids, actor=Actor.person(caller))
        except PolicyError as error:
            raise ProblemError(ProblemCode.POLICY_CHANGED, f"{error} Put the policy anew.") from None
    return Pruned(
        trashed=pruned_views(applied.gone),
        left=left_views(
            [each.fact for each in applied.kept], {each.fact.id: each.reasons for each in applied.kept if each.keep}
        ),
        purge_at=when(applied.purge_at, applied.gone),
        freed=freed_of(context, applied.gone),
    )


def expire_shown(
    session: Session,
    context: ServiceContext,
    run: Run,
    policy: StoredPolicy,
    shown: Collection[str],
    *,
    actor: Actor,
) -> Applied:
    """Under the run's lock. At most MAX_AT_ONCE go. Raises PolicyError."""
    rules = stored_rules(policy)
    wanted = set(shown)
    plan = [each for each in make_plan(rules, read_facts(session, run, rules)) if each.fact.id in wanted]
    may_go = [each for each in plan if not each.keep][:MAX_AT_ONCE]
    reason = f"retention policy of the {policy.level}, version {policy.version}"
    gone, purge_at = move_to_trash(
        session,
        run,
        [each.fact for each in may_go],
        Trashing.by_policy(context, actor, reason),
        {each.fact.id: each.reasons for each in may_go},
    )
    return Applied(
        gone=[each.fact for each in may_go if each.fact.id in gone],
        kept=[each for each in plan if each.fact.id not in gone],
        purge_at=purge_at,
    )


def _changed(project: str, run: str, policy: StoredPolicy | None) -> ProblemError:
    what = "was deleted" if policy is None else f"is version {policy.version} of the {policy.level} now"
    return ProblemError(
        ProblemCode.POLICY_CHANGED,
        f"The retention policy of {project}/{run} {what}, and the plan was made by another. Nothing was expired; look "
        "at `holdfast retention plan` again.",
        policy_digest=None if policy is None else policy_digest(policy),
    )
