"""Deletes a target's own policy; a run has its project's from then on."""

from __future__ import annotations

from holdfast_protocol.policies import PolicyView
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.policies import StoredPolicy
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.policies.target import PolicyName, locked_policy, refuse_unless_seen, target_of


def remove_policy(context: ServiceContext, caller: Principal, name: PolicyName, if_match: str | None) -> PolicyView:
    """What it was. Raises `policy_not_found`, `edit_conflict`, and what finding the target raises."""
    with context.database.transaction() as session:
        target = target_of(session, caller, name)
        row = locked_policy(session, target, name.kind)
        if row is None:
            raise ProblemError(
                ProblemCode.POLICY_NOT_FOUND, f"{target} has no {name.kind} policy of its own.", kind=name.kind.value
            )
        refuse_unless_seen(row, if_match, target)
        removed = StoredPolicy.of(row)
        session.delete(row)
        record_event(
            session,
            Actor.person(caller),
            "policy.delete",
            project_id=target.project_id,
            run_id=target.run_id,
            before={"kind": name.kind.value, "document": removed.document, "version": removed.version},
        )
        subject_changed(session, RecordKind.PROJECT, target.project_id, target.project_id)
        return target.view(removed)
