"""Policies of any kind: put, shown, deleted; and which one holds for a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Request
from holdfast_protocol.copies import CopyPolicy
from holdfast_protocol.policies.policy import PolicyError, PolicyKind, PolicyView, PutPolicy, read_policy
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import StoreRole
from holdfast_protocol.tiers import COLD_STORE, StorageClass, TierPolicy
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.operations import Policy
from holdfast_service.errors import ProblemError, refuse_unless_seen
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed
from holdfast_service.runs.views import project_named, run_named
from holdfast_service.stores.base import ClassedStore, StoreRefused


@dataclass(frozen=True)
class StoredPolicy:
    """`document` as it was put: a controller reads it with `holdfast_protocol.policies.policy.read_policy`, and does
    nothing if that refuses. `run_id` None: the project's."""

    kind: PolicyKind
    project_id: str
    run_id: str | None
    document: dict[str, Any]
    version: int
    updated_at: datetime
    updated_by: str

    @property
    def level(self) -> Literal["project", "run"]:
        return "project" if self.run_id is None else "run"

    @property
    def etag(self) -> str:
        """With the moment in it: one that is put after a deletion has version 1 again."""
        return f'"{self.version}-{self.updated_at:%Y%m%dT%H%M%S.%f}"'

    @classmethod
    def of(cls, row: Policy) -> StoredPolicy:
        return cls(
            kind=PolicyKind(row.kind),
            project_id=row.project_id,
            run_id=row.run_id or None,
            document=dict(row.document),
            version=row.version,
            updated_at=row.updated_at,
            updated_by=row.updated_by,
        )


def effective_policy(session: Session, kind: PolicyKind, project_id: str, run_id: str | None) -> StoredPolicy | None:
    """The run's own, else the project's; None if neither has one. Without a run, the project's. Every controller that
    follows a policy asks here."""
    # Later than any lock that the caller holds, whatever the session has read before.
    rows = session.scalars(
        select(Policy)
        .where(Policy.project_id == project_id, Policy.kind == kind, Policy.run_id.in_({"", run_id or ""}))
        .order_by(Policy.run_id.desc()),
        execution_options={"populate_existing": True},
    )
    row = rows.first()
    return None if row is None else StoredPolicy.of(row)


def effective_policies(
    session: Session, kind: PolicyKind, *, project_id: str | None = None
) -> Callable[[str, str], StoredPolicy | None]:
    """The same for every run, or those of a project, in one statement: (project_id, run_id) -> policy. For a look that
    locks nothing."""
    query = select(Policy).where(Policy.kind == kind)
    if project_id is not None:
        query = query.where(Policy.project_id == project_id)
    rows = session.scalars(query, execution_options={"populate_existing": True})
    found = {(row.project_id, row.run_id): StoredPolicy.of(row) for row in rows}
    return lambda project_id, run_id: found.get((project_id, run_id)) or found.get((project_id, ""))


def refuse_unfit(context: ServiceContext, policy: Request) -> None:
    """Asks the stores whether this service can do what a policy asks for, before the policy is kept. Raises
    `invalid_request`, and StoreError if the store does not say. Never called inside a transaction."""
    if isinstance(policy, CopyPolicy) and context.attached(StoreRole.SECOND) is None:
        raise _unfit(
            "A policy of copies needs a second store, and this service has none. Set HOLDFAST_SECOND_STORE.",
            PolicyKind.COPIES,
        )
    if isinstance(policy, TierPolicy):
        for target in policy.targets():
            _refuse_unfit_target(context, target)


def _refuse_unfit_target(context: ServiceContext, target: str) -> None:
    if target == COLD_STORE:
        if context.attached(StoreRole.COLD) is None:
            raise _unfit(
                "`to: cold` needs a cold store, and this service has none. Set HOLDFAST_COLD_STORE, or use "
                "storage_class where the store is a bucket with classes."
            )
        return
    store = context.store
    if not isinstance(store, ClassedStore):
        raise _unfit(
            f"The store is {context.store.kind}, which has no storage class {target}. Set HOLDFAST_COLD_STORE to a "
            "second place, and use `to: cold`."
        )
    wanted = StorageClass(target)
    if wanted not in store.class_terms:
        raise _unfit(
            f"The store is {context.store.kind}, which has no storage class {target}. It has "
            f"{', '.join(store.class_terms)}."
        )
    try:
        store.check_storage_class(wanted)
    except StoreRefused as error:
        raise _unfit(
            f"The store cannot keep anything in {target}: {error}. Use a class that it has, or set HOLDFAST_COLD_STORE "
            "and use `to: cold`."
        ) from error


def _unfit(detail: str, kind: PolicyKind = PolicyKind.TIERS) -> ProblemError:
    return ProblemError(ProblemCode.INVALID_REQUEST, detail, kind=kind.value)


@dataclass(frozen=True)
class PolicyName:
    """As a request names a policy. `run` None: the project's."""

    kind: PolicyKind
    project: str
    run: str | None = None


@dataclass(frozen=True)
class Target:
    """`run_id` and `run` None: the project."""

    project_id: str
    project: str
    run_id: str | None = None
    run: str | None = None

    def __str__(self) -> str:
        return self.project if self.run is None else f"{self.project}/{self.run}"

    def view(self, policy: StoredPolicy) -> PolicyView:
        return PolicyView(
            kind=policy.kind,
            project=self.project,
            run=self.run if policy.level == "run" else None,
            level=policy.level,
            document=policy.document,
            version=policy.version,
            etag=policy.etag,
            updated_at=policy.updated_at,
            updated_by=policy.updated_by,
        )


def target_of(session: Session, caller: Principal, name: PolicyName) -> Target:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    if name.run is None:
        owner = project_named(session, caller, name.project)
        return Target(owner.id, owner.name)
    owner, found = run_named(session, caller, name.project, name.run)
    return Target(owner.id, owner.name, found.id, found.name)


def locked_policy(session: Session, target: Target, kind: PolicyKind) -> Policy | None:
    """The target's own. The project's row is locked, so that of two first ones that are put at once one is seen."""
    session.execute(select(Project.id).where(Project.id == target.project_id).with_for_update(key_share=True))
    return session.scalar(
        select(Policy)
        .where(Policy.project_id == target.project_id, Policy.run_id == (target.run_id or ""), Policy.kind == kind)
        .with_for_update(),
        execution_options={"populate_existing": True},
    )


def _refuse_unless_seen(policy: Policy, if_match: str | None, target: Target) -> None:
    refuse_unless_seen(f"the {policy.kind} policy of {target}", StoredPolicy.of(policy).etag, if_match)


def no_policy(target: Target, kind: PolicyKind) -> ProblemError:
    where = str(target) if target.run is None else f"{target} and its project"
    return ProblemError(
        ProblemCode.POLICY_NOT_FOUND,
        f"There is no {kind} policy for {where}. `holdfast policies put` makes one.",
        kind=kind.value,
    )


def put_policy(
    context: ServiceContext, caller: Principal, name: PolicyName, request: PutPolicy, if_match: str | None
) -> tuple[PolicyView, bool]:
    """Puts a policy: the first one of its target, or a new version of the one that was seen. Returns it, and whether it
    is the target's first. The same document again is fine, whatever version was seen. Raises `invalid_request` for what
    is no policy, `edit_needs_version`, `edit_conflict`, and what finding the target raises."""
    kind = name.kind
    try:
        policy = read_policy(kind, request.document)
    except PolicyError as error:
        errors = [{"where": ["body", "document", *each.where], "message": each.message} for each in error.faults]
        raise ProblemError(
            ProblemCode.INVALID_REQUEST, f"{error} Correct the policy.", kind=kind.value, errors=errors
        ) from None
    document = policy.model_dump(mode="json", exclude_defaults=True)
    refuse_unfit(context, policy)
    with context.database.transaction() as session:
        target = target_of(session, caller, name)
        row = locked_policy(session, target, kind)
        now = database_now(session)
        if row is not None and row.document == document:
            return target.view(StoredPolicy.of(row)), False
        before = None if row is None else {"document": dict(row.document), "version": row.version}
        if row is None:
            _refuse_if_one_was_seen(if_match, target, kind)
            row = Policy(project_id=target.project_id, run_id=target.run_id or "", kind=kind, version=1)
            session.add(row)
        else:
            _refuse_unless_seen(row, if_match, target)
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
        return target.view(StoredPolicy.of(row)), before is None


def _refuse_if_one_was_seen(if_match: str | None, target: Target, kind: PolicyKind) -> None:
    if if_match not in (None, "*"):
        raise ProblemError(
            ProblemCode.EDIT_CONFLICT,
            f"The {kind} policy of {target} was deleted since it was read. To make a new one, leave If-Match out.",
        )


def show_policy(context: ServiceContext, caller: Principal, name: PolicyName) -> PolicyView:
    """The policy that holds: for a run its own, else its project's. Raises `policy_not_found`, and what finding the
    target raises."""
    with context.database.read() as session:
        target = target_of(session, caller, name)
        policy = effective_policy(session, name.kind, target.project_id, target.run_id)
        if policy is None:
            raise no_policy(target, name.kind)
        return target.view(policy)


def remove_policy(context: ServiceContext, caller: Principal, name: PolicyName, if_match: str | None) -> PolicyView:
    """Deletes a target's own policy and returns it; a run has its project's from then on. Raises `policy_not_found`,
    `edit_conflict`, and what finding the target raises."""
    with context.database.transaction() as session:
        target = target_of(session, caller, name)
        row = locked_policy(session, target, name.kind)
        if row is None:
            raise ProblemError(
                ProblemCode.POLICY_NOT_FOUND, f"{target} has no {name.kind} policy of its own.", kind=name.kind.value
            )
        _refuse_unless_seen(row, if_match, target)
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
