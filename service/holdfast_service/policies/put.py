"""Puts a policy: the first one of its target, or a new version of the one that was seen."""

from __future__ import annotations

from holdfast_protocol.policies import PolicyError, PolicyKind, PolicyView, PutPolicy, read_policy
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Policy
from holdfast_service.catalog.policies import StoredPolicy
from holdfast_service.catalog.policy_fits import refuse_unfit
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.policies.target import PolicyName, Target, locked_policy, refuse_unless_seen, target_of


def put_policy(
    context: ServiceContext, caller: Principal, name: PolicyName, request: PutPolicy, if_match: str | None
) -> PolicyView:
    """The same document again is fine, whatever version was seen. Raises `invalid_request` for what is no policy,
    `edit_conflict`, and what finding the target raises."""
    kind = name.kind
    try:
        policy = read_policy(kind, request.document)
    except PolicyError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{error} Correct the policy.", kind=kind.value) from None
    document = policy.model_dump(mode="json", exclude_defaults=True)
    refuse_unfit(context, policy)
    with context.database.transaction() as session:
        target = target_of(session, caller, name)
        row = locked_policy(session, target, kind)
        now = database_now(session)
        if row is not None and row.document == document:
            return target.view(StoredPolicy.of(row))
        before = None if row is None else {"document": dict(row.document), "version": row.version}
        if row is None:
            _refuse_if_one_was_seen(if_match, target, kind)
            row = Policy(project_id=target.project_id, run_id=target.run_id or "", kind=kind, version=1)
            session.add(row)
        else:
            refuse_unless_seen(row, if_match, target)
            row.version += 1
        row.document = document
        row.updated_at = now
        row.updated_by = caller.name
        session.flush()
        record_event(
            session,
            Actor.person(caller),
            "policy.put",
            project_id=target.project_id,
            run_id=target.run_id,
            before=before,
            after={"kind": kind.value, "document": document, "version": row.version},
        )
        subject_changed(session, RecordKind.PROJECT, target.project_id, target.project_id)
        return target.view(StoredPolicy.of(row))


def _refuse_if_one_was_seen(if_match: str | None, target: Target, kind: PolicyKind) -> None:
    if if_match not in (None, "*"):
        raise ProblemError(
            ProblemCode.EDIT_CONFLICT,
            f"The {kind} policy of {target} was deleted since it was read. To make a new one, leave If-Match out.",
        )
