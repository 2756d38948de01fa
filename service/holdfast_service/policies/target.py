"""What a policy is for: a project, or one run of it; and its row."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.policies import PolicyKind, PolicyView
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.custody_tables import Policy
from holdfast_service.catalog.policies import StoredPolicy
from holdfast_service.catalog.resolve import project_named, run_named
from holdfast_service.catalog.tables import Project
from holdfast_service.errors import ProblemError


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


def refuse_unless_seen(policy: Policy, if_match: str | None, target: Target) -> None:
    """Raises `invalid_request` without a version, and `edit_conflict` for another than this one."""
    if if_match is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"{target} has a {policy.kind} policy already. Look at it, and send its `etag` as the header If-Match.",
            etag=StoredPolicy.of(policy).etag,
        )
    if if_match not in (StoredPolicy.of(policy).etag, "*"):
        raise ProblemError(
            ProblemCode.EDIT_CONFLICT,
            f"The {policy.kind} policy of {target} was changed since it was read. Read it again and decide anew.",
            etag=StoredPolicy.of(policy).etag,
        )


def no_policy(target: Target, kind: PolicyKind) -> ProblemError:
    where = str(target) if target.run is None else f"{target} and its project"
    return ProblemError(
        ProblemCode.POLICY_NOT_FOUND,
        f"There is no {kind} policy for {where}. `holdfast policy put` makes one.",
        kind=kind.value,
    )
