"""A Holdfast token for a verified identity: what the rules give it, on one project or on every one, for a while.

The token is a row like any other: listed, revoked, rotated by an administrator, in the audit log. It has the issuer and
the subject, and ends no later than the rule says. A job's token may be exchanged again, by each rank and each launch; a
person's ID token, and what a rule marks `once`, is taken once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import text_to_keep
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import ExchangedToken, ExchangeToken
from holdfast_protocol.states import Role
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import new_token_text
from holdfast_service.auth.tokens import insert_token, token_facts, token_view
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_new
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.identities import UsedIdentityToken
from holdfast_service.errors import ProblemError
from holdfast_service.identity.identities import Identities, VerifiedIdentity
from holdfast_service.identity.rules import decide, grants_of

_LONGEST_NAME = 100


def identities_in(context: ServiceContext) -> Identities:
    """Raises `identity_not_configured`."""
    if context.identities is None:
        raise ProblemError(
            ProblemCode.IDENTITY_NOT_CONFIGURED,
            "This service takes no tokens of other issuers. Set HOLDFAST_TOKEN, or ask an administrator for "
            "HOLDFAST_IDENTITY_FILE.",
        )
    return context.identities


def exchange_token(
    context: ServiceContext, request: ExchangeToken, *, count: Callable[[str, str], None]
) -> ExchangedToken:
    """After the wait for what `Identities.needs` gives: none is left for this thread, which has a turn. `count` is told
    the identity, and the rules that let it in, before it gets a token. Raises what `Identities.verify`, `make_token`
    and `count` raise, and `identity_not_configured`."""
    identity = identities_in(context).verify(request.subject_token, waits=False)
    return make_token(
        context,
        identity,
        project=request.project,
        role=request.role,
        expires_in_seconds=request.expires_in_seconds,
        count=count,
    )


def make_token(
    context: ServiceContext,
    identity: VerifiedIdentity,
    *,
    project: str | None = None,
    role: Role | None = None,
    expires_in_seconds: int | None = None,
    count: Callable[[str, str], None] | None = None,
) -> ExchangedToken:
    """The token of a verified identity. Raises what `count` raises, `identity_not_granted`, `identity_project_needed`,
    `identity_token_used` and `project_not_found`."""
    rules = identities_in(context).rules
    decision = decide(grants_of(rules, identity.provider, identity.claims), project=project, role=role)
    seconds = min(decision.longest_seconds, expires_in_seconds or decision.longest_seconds)
    if count is not None:
        count(f"{identity.subject} of {identity.provider.issuer}", f"the rule {' and '.join(decision.rules)}")
    text = new_token_text()
    with context.database.transaction() as session:
        project_id = None if decision.project is None else _project_id(session, decision.project)
        if decision.once or identity.is_person:
            _use_up(session, identity)
        token = insert_token(
            session,
            text,
            name=text_to_keep(f"{identity.provider.name}: {identity.subject}", _LONGEST_NAME),
            scopes=decision.scopes,
            project_id=project_id,
            expires_at=database_now(session) + timedelta(seconds=seconds),
            issuer=identity.provider.issuer,
            subject=identity.subject,
            requests_per_second=decision.requests_per_second,
            concurrent_requests=decision.concurrent_requests,
        )
        record_event(
            session,
            Actor("person", token.name, token.id),
            "token.exchange",
            project_id=project_id,
            after=token_facts(token) | {"roles": list(decision.roles), "rules": list(decision.rules)},
        )
        view = token_view(token, decision.project)
    return ExchangedToken(
        **view.model_dump(),
        roles=list(decision.roles),
        access_token=text,
        expires_in=seconds,
        scope=" ".join(view.scopes),
    )


def _project_id(session: Session, name: str) -> str:
    project_id = session.scalar(select(Project.id).where(Project.name == name, Project.deleted_at.is_(None)))
    if project_id is None:
        raise ProblemError(
            ProblemCode.PROJECT_NOT_FOUND,
            f"There is no project {name!r}, though a rule names it. Correct the name, or make it with `holdfast "
            f"projects create {name}`.",
            project=name,
        )
    return project_id


def _use_up(session: Session, identity: VerifiedIdentity) -> None:
    """One call inserts the row; a second one at the same time, through another service, finds it."""
    row = {"id": identity.mark, "expires_at": identity.expires_at}
    if not insert_new(session, UsedIdentityToken, [row], UsedIdentityToken.id):
        raise ProblemError(
            ProblemCode.IDENTITY_TOKEN_USED,
            "The token of the identity was exchanged before, and it is good for once. Sign in again, or have the "
            "platform issue another one.",
        )
