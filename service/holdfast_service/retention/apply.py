"""Applies a plan: expires what was shown and what the state under the run's lock allows too (protocol rule 27).

The plan is made anew under the lock. What it keeps by now (a pin, a reader, a label, another newest point) stays,
whatever was shown; and what it would expire and nobody was shown stays until the next look. Only another policy refuses
the whole: its reasons are not those that were read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from holdfast_protocol.policies import PolicyError, PolicyKind
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import MAX_AT_ONCE, ApplyRetention, Pruned
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.policies import StoredPolicy, effective_policy
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Run
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.retention.facts import Fact
from holdfast_service.retention.plan import Decision, make_plan, policy_digest
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.result import freed_of, left_views, pruned_views, when
from holdfast_service.retention.show_plan import stored_rules
from holdfast_service.retention.trash import Trashing, lock_run, move_to_trash


@dataclass(frozen=True)
class Applied:
    """`gone` went to the trash; `kept` were asked for and stay, with the plan's decision; of these `changed` had been
    allowed to go until their own lock was taken."""

    gone: list[Fact]
    kept: list[Decision]
    purge_at: datetime


def apply_plan(context: ServiceContext, caller: Principal, project: str, run: str, request: ApplyRetention) -> Pruned:
    """Twice is fine: what is in the trash already is not asked about again. Raises `policy_changed`, `forbidden`,
    `project_not_found` and `run_not_found`."""
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
