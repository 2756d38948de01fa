"""The controller `retention`: applies policies by itself, run by run, each under a lease of its own.

A run is looked at when something was committed or its policy was changed since the last look, and once an hour in any
case, for pins, leases and attempts end without a word. Most looks find nothing and lock nothing: only a plan that would
expire something is made again under the run's lock, and applied there.

A look that comes long after the one before expires nothing: the clock may have jumped, and a commit since may be dated
by it. The next look does (rule database-clock).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, exists, func, literal, select
from sqlalchemy.orm import Session

from holdfast_protocol.policies.policy import PolicyError, PolicyKind
from holdfast_protocol.pruning import MAX_AT_ONCE
from holdfast_protocol.states import CheckpointState
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import Moment, database_now, insert_absent
from holdfast_service.db.tables.core import Checkpoint, Run
from holdfast_service.db.tables.operations import Policy, RetentionMark
from holdfast_service.policies.policies import effective_policies, effective_policy
from holdfast_service.records.history import settle_history
from holdfast_service.retention import purge
from holdfast_service.retention.plan import RunFacts, make_plan, policy_digest
from holdfast_service.retention.prune import expire_shown
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.show_plan import CONTROLLER, stored_rules
from holdfast_service.retention.trash import lock_run
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

NAME = CONTROLLER
_LOOK_AGAIN = timedelta(hours=1)
_BEFORE_ALL = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class RetentionReport(ReconcileReport):
    """`done`: runs that were looked at; `expired`: checkpoints that went to the trash."""

    expired: int = 0


@dataclass(frozen=True)
class _Claim:
    run_id: str
    token: str


def reconcile(context: ServiceContext) -> RetentionReport:
    settle_history(context)
    done = failed = expired = 0
    error: str | None = None
    with context.database.read() as session:
        due = _due(session)
    for run_id in due:
        if context.stopping.is_set():
            break
        claim = _claim(context, run_id)
        if claim is None:
            continue
        try:
            expired += _look_at(context, claim)
            done += 1
        except PolicyError as wrong:
            # A policy that cannot be read expires nothing; the run stays due.
            failed += 1
            error = f"{_name(context, run_id)}: {wrong}"
            _let_go(context, claim)
    return RetentionReport(done=done, failed=failed, error=error, expired=expired)


def backlog(session: Session, _context: ServiceContext) -> Backlog:
    now = database_now(session)
    leased = session.scalar(select(func.count()).where(RetentionMark.leased_until > now))
    return Backlog(due=len(_due(session)), leased=leased or 0)


def _due(session: Session) -> list[str]:
    """Runs that have a policy, and something new. The same few statements for however many runs."""
    policy_of = effective_policies(session, PolicyKind.RETENTION)
    committed = exists().where(
        Checkpoint.run_id == Run.id,
        Checkpoint.state == CheckpointState.COMMITTED,
        Checkpoint.committed_at > func.coalesce(RetentionMark.newest_at, literal(_BEFORE_ALL, Moment)),
    )
    has_policy = exists().where(
        Policy.kind == PolicyKind.RETENTION, Policy.project_id == Run.project_id, Policy.run_id.in_(("", Run.id))
    )
    rows = session.execute(
        select(
            Run.id,
            Run.project_id,
            RetentionMark.looked_at,
            RetentionMark.policy_digest,
            committed.label("has_newer"),
        )
        .outerjoin(RetentionMark, RetentionMark.run_id == Run.id)
        .where(has_policy, Run.deleted_at.is_(None), lease.is_free(RetentionMark.leased_until, database_now(session)))
        .order_by(RetentionMark.looked_at, Run.id)
    ).all()
    now = database_now(session)
    due = []
    for row in rows:
        policy = policy_of(row.project_id, row.id)
        if policy is None:
            continue
        # A look that is still to come was one by a clock that was ahead.
        old = row.looked_at is None or not now - _LOOK_AGAIN <= row.looked_at <= now
        if old or row.policy_digest != policy_digest(policy) or row.has_newer:
            due.append(row.id)
    return due


def _claim(context: ServiceContext, run_id: str) -> _Claim | None:
    """None if another process has it."""
    with context.database.transaction() as session:
        insert_absent(session, RetentionMark, [{"run_id": run_id}])
        seconds = context.settings.lease_seconds
        token = lease.claim(session, RetentionMark, RetentionMark.run_id == run_id, seconds=seconds)
    return None if token is None else _Claim(run_id, token)


def _look_at(context: ServiceContext, claim: _Claim) -> int:
    """How many expired. A process that dies in here leaves the rest to the next look: each portion is whole."""
    expired = 0
    while True:
        with context.database.read() as session:
            run = session.get_one(Run, claim.run_id)
            policy = effective_policy(session, PolicyKind.RETENTION, run.project_id, run.id)
            if policy is None:
                _let_go(context, claim)
                return expired
            rules = stored_rules(policy)
            facts = read_facts(session, run, rules)
            looked_at = database_now(session)
            after_gap = _is_after_gap(session, context.settings, claim, looked_at)
            doomed = [] if after_gap else [each.fact.id for each in make_plan(rules, facts) if not each.keep]
        if not doomed or not (gone := _expire(context, claim, doomed)):
            _settle(context, claim, policy_digest(policy), looked_at, facts)
            return expired
        expired += gone
        if context.stopping.is_set():
            _let_go(context, claim)
            return expired
        if not _renew(context, claim):
            return expired


def _is_after_gap(session: Session, settings: ServiceSettings, claim: _Claim, looked_at: datetime) -> bool:
    before = session.scalar(select(RetentionMark.looked_at).where(_is(claim)))
    usual = _LOOK_AGAIN + timedelta(seconds=settings.retention_interval_seconds)
    return before is not None and looked_at - before > 2 * usual


def _expire(context: ServiceContext, claim: _Claim, doomed: list[str]) -> int:
    with context.database.transaction() as session:
        run = lock_run(session, claim.run_id)
        # A later statement than the lock: a policy that was put meanwhile is the one that counts.
        policy = effective_policy(session, PolicyKind.RETENTION, run.project_id, run.id)
        if policy is None:
            return 0
        actor = Actor.controller(NAME)
        return len(expire_shown(session, context, run, policy, doomed[:MAX_AT_ONCE], actor=actor).gone)


def _settle(context: ServiceContext, claim: _Claim, digest: str, looked_at: datetime, facts: RunFacts) -> None:
    newest_at = max((fact.at for fact in facts.facts if fact.committed), default=None)
    with context.database.transaction() as session:
        lease.give_back(
            session,
            RetentionMark,
            claim.token,
            _is(claim),
            looked_at=looked_at,
            policy_digest=digest,
            newest_at=newest_at,
        )


def _renew(context: ServiceContext, claim: _Claim) -> bool:
    """Between two portions; False if another process has taken the run over, which goes on with it."""
    with context.database.transaction() as session:
        seconds = context.settings.lease_seconds
        return lease.renew(session, RetentionMark, claim.token, _is(claim), seconds=seconds)


def _let_go(context: ServiceContext, claim: _Claim) -> None:
    with context.database.transaction() as session:
        lease.give_back(session, RetentionMark, claim.token, _is(claim))


def _is(claim: _Claim) -> ColumnElement[bool]:
    return RetentionMark.run_id == claim.run_id


def _name(context: ServiceContext, run_id: str) -> str:
    with context.database.read() as session:
        return session.get_one(Run, run_id).name


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    purge_seconds = settings.controller_interval_seconds * purge.EVERY_ROUNDS
    return (
        ControllerLoop(NAME, settings.retention_interval_seconds, reconcile, backlog),
        ControllerLoop(purge.NAME, purge_seconds, purge.reconcile, purge.backlog, longest_pauses=purge.LONGEST_PAUSES),
    )
