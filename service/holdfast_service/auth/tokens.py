"""Tokens: made, listed, replaced and revoked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import CreateToken, RotateToken, TokenCreated, TokenRotated, TokenView
from holdfast_protocol.states import Scope
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal, new_token_text, parse_token
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.db.repeats import Repeatable, already_made, digest_of
from holdfast_service.db.tables.core import Project, Token
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import project_named


def token_row(
    session: Session,
    text: str,
    *,
    name: str,
    scopes: Iterable[Scope],
    project_id: str | None,
    expires_at: datetime | None,
    created_by_token: str | None = None,
    issuer: str | None = None,
    subject: str | None = None,
) -> dict[str, Any]:
    """The columns of `tokens`; the token itself is kept only as a hash. `created_by_token`: None for a token that is
    made at the database, or for an identity: then `issuer` and `subject` say whose."""
    token_id, secret_sha256 = parse_token(text)
    return {
        "id": token_id,
        "name": name,
        "secret_sha256": secret_sha256,
        "project_id": project_id,
        "scopes": sorted({scope.value for scope in scopes}),
        "created_at": database_now(session),
        "created_by_token": created_by_token,
        "expires_at": expires_at,
        "revoked_at": None,
        "issuer": issuer,
        "subject": subject,
    }


def insert_token(
    session: Session,
    text: str,
    *,
    name: str,
    scopes: Iterable[Scope],
    project_id: str | None,
    expires_at: datetime | None,
    created_by_token: str | None = None,
    issuer: str | None = None,
    subject: str | None = None,
    requests_per_second: float | None = None,
    concurrent_requests: int | None = None,
) -> Token:
    row = token_row(
        session,
        text,
        name=name,
        scopes=scopes,
        project_id=project_id,
        expires_at=expires_at,
        created_by_token=created_by_token,
        issuer=issuer,
        subject=subject,
    )
    token = Token(**row, requests_per_second=requests_per_second, concurrent_requests=concurrent_requests)
    session.add(token)
    session.flush()
    return token


def token_view(token: Token, project_name: str | None) -> TokenView:
    """How a token is shown: never its secret, nor the secret's hash."""
    return TokenView(
        id=token.id,
        name=token.name,
        project=project_name,
        scopes=[Scope(scope) for scope in token.scopes],
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
        last_used_at=token.last_used_at,
        requests_per_second=token.requests_per_second,
        concurrent_requests=token.concurrent_requests,
        issuer=token.issuer,
        subject=token.subject,
    )


def token_facts(token: Token) -> dict[str, Any]:
    """What an audit event says of it."""
    return {
        "token": token.id,
        "name": token.name,
        "scopes": list(token.scopes),
        "expires_at": None if token.expires_at is None else token.expires_at.isoformat(),
        **{name: value for name in (*_LIMITS, *_IDENTITY) if (value := getattr(token, name)) is not None},
    }


_LIMITS = ("requests_per_second", "concurrent_requests")
_IDENTITY = ("issuer", "subject")


def create_token(
    context: ServiceContext, caller: Principal, request: CreateToken, key: str | None = None
) -> TokenCreated:
    """Makes a token. A project's administrator can make them for that project only, and never with more than their own
    scopes and limits. `key`: the client's Idempotency-Key. Raises `forbidden` for what the caller does not have,
    `project_not_found`, `already_made` and `idempotency_key_reused`."""
    for scope in request.scopes:
        caller.check_scope(scope)
    if request.project is None and caller.project_name is not None:
        raise ProblemError(
            ProblemCode.FORBIDDEN,
            f"The token {caller.name!r} belongs to the project {caller.project_name!r} and cannot make one for every "
            "project. Name the project.",
        )
    limits = {limit: _within(caller, limit, getattr(request, limit)) for limit in _LIMITS}
    text = new_token_text()
    repeat = Repeatable(caller.token_id, key, digest_of("token", request=request))
    with context.database.transaction() as session:
        if (earlier := repeat.earlier(session)) is not None:
            raise already_made("token", earlier)
        project = project_named(session, caller, request.project) if request.project is not None else None
        token = _make(
            session,
            caller,
            text,
            name=request.name,
            scopes=request.scopes,
            project_id=project.id if project else None,
            expires_in_seconds=request.expires_in_seconds,
            limits=limits,
        )
        repeat.made(session, token.id)
        view = token_view(token, request.project)
    return TokenCreated(**view.model_dump(), token=text)


def rotate_token(
    context: ServiceContext, caller: Principal, token_id: str, request: RotateToken, key: str | None = None
) -> TokenRotated:
    """Makes a token like this one, with its name, project, scopes and limits, and has this one end after the overlap if
    it does not end before. The new one is the caller's making, with no more than its own scopes and limits. `key`: the
    client's Idempotency-Key. Raises `token_not_found`, `invalid_request` for a token that is over, `forbidden`,
    `already_made` and `idempotency_key_reused`."""
    text = new_token_text()
    repeat = Repeatable(caller.token_id, key, digest_of("rotated-token", token_id, request=request))
    with context.database.transaction() as session:
        if (earlier := repeat.earlier(session)) is not None:
            raise already_made("token", earlier)
        old, project_name = _known(session, caller, token_id)
        now = database_now(session)
        if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"The token {old.id} is over, and there is nothing to replace. Make a new token.",
            )
        scopes = [Scope(scope) for scope in old.scopes]
        for scope in scopes:
            caller.check_scope(scope)
        token = _make(
            session,
            caller,
            text,
            name=old.name,
            scopes=scopes,
            project_id=old.project_id,
            expires_in_seconds=request.expires_in_seconds,
            limits={limit: _within(caller, limit, getattr(old, limit)) for limit in _LIMITS},
            replaces=old.id,
        )
        before = token_facts(old)
        ends_at = now + timedelta(seconds=request.overlap_seconds)
        old.expires_at = ends_at if old.expires_at is None else min(old.expires_at, ends_at)
        record_event(
            session,
            Actor.person(caller),
            "token.rotate",
            project_id=old.project_id,
            before=before,
            after=token_facts(old) | {"replaced_by": token.id},
        )
        repeat.made(session, token.id)
        view, replaced = token_view(token, project_name), token_view(old, project_name)
    return TokenRotated(**view.model_dump(), token=text, replaced=replaced)


def _make(
    session: Session,
    caller: Principal,
    text: str,
    *,
    name: str,
    scopes: Iterable[Scope],
    project_id: str | None,
    expires_in_seconds: int | None,
    limits: Mapping[str, float | None],
    replaces: str | None = None,
) -> Token:
    """With its event."""
    expires_at = None
    if expires_in_seconds is not None:
        expires_at = database_now(session) + timedelta(seconds=expires_in_seconds)
    token = insert_token(
        session,
        text,
        name=name,
        scopes=scopes,
        project_id=project_id,
        expires_at=expires_at,
        created_by_token=caller.token_id,
    )
    for limit, value in limits.items():
        setattr(token, limit, value)
    session.flush()
    made = token_facts(token)
    if caller.session_id is not None:
        made["by_session"] = caller.session_id
    if replaces is not None:
        made["replaces"] = replaces
    record_event(session, Actor.person(caller), "token.create", project_id=project_id, after=made)
    return token


def _within(caller: Principal, limit: str, wanted: float | None) -> float | None:
    """The new token's limit: the caller's, if it asks for none. Raises `forbidden` for more."""
    own: float | None = getattr(caller, limit)
    if own is not None and wanted is not None and wanted > own:
        raise ProblemError(
            ProblemCode.FORBIDDEN,
            f"The token {caller.name!r} has the limit {limit} {own:g} and cannot make one with {wanted:g}. Ask for "
            "less, or use a token without that limit.",
            limited=limit,
        )
    return own if wanted is None else wanted


_CURSOR = "tokens"


def list_tokens(context: ServiceContext, caller: Principal, *, cursor: str | None, limit: int) -> Page[TokenView]:
    """The tokens that the caller may know of: all of them, or its project's."""
    query = (
        select(Token, Project.name)
        .outerjoin(Project, Project.id == Token.project_id)
        .order_by(Token.created_at.desc(), Token.id.desc())
        .limit(limit + 1)
    )
    if caller.project_id is not None:
        query = query.where(Token.project_id == caller.project_id)
    if cursor is not None:
        created_at, token_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(Token.created_at, Token.id) < (moment_from_text(created_at), token_id))
    with context.database.read() as session:
        rows = session.execute(query).all()
    shown, next_cursor = cut_page(_CURSOR, rows, limit, lambda row: (moment_to_text(row[0].created_at), row[0].id))
    return Page(items=[token_view(token, project_name) for token, project_name in shown], next_cursor=next_cursor)


def revoke_token(context: ServiceContext, caller: Principal, token_id: str) -> TokenView:
    """Revokes a token: the next call with it is refused. Twice is fine, and the first moment stays. Raises
    `token_not_found`, also if the caller may not know of it."""
    with context.database.transaction() as session:
        token, project_name = _known(session, caller, token_id)
        _revoke(session, caller, token)
        return token_view(token, project_name)


def revoke_own_token(context: ServiceContext, caller: Principal) -> TokenView:
    """For who signed in by a command, and signs out. Only a token that was made for an identity, which gets another one
    whenever it comes: who steals another one must not end a training with it. Raises `forbidden` for these, and for a
    session."""
    with context.database.transaction() as session:
        token, project_name = _known(session, caller, caller.token_id)
        if caller.session_id is not None or token.issuer is None:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {caller.name!r} was not made by a command's sign-in. To end a session of the page, sign "
                f"out there; to revoke a token, run `holdfast tokens revoke {token.id}` as an administrator.",
            )
        _revoke(session, caller, token)
        return token_view(token, project_name)


def _revoke(session: Session, caller: Principal, token: Token) -> None:
    """Twice is fine, and the first moment stays."""
    if token.revoked_at is None:
        token.revoked_at = database_now(session)
        record_event(
            session, Actor.person(caller), "token.revoke", project_id=token.project_id, before=token_facts(token)
        )


def _known(session: Session, caller: Principal, token_id: str) -> tuple[Token, str | None]:
    """Locked, and the name of its project. Raises `token_not_found`, also if the caller may not know of it."""
    row = session.execute(
        select(Token, Project.name)
        .outerjoin(Project, Project.id == Token.project_id)
        .where(Token.id == token_id)
        .with_for_update(of=Token)
    ).one_or_none()
    if row is None or (caller.project_id is not None and row[0].project_id != caller.project_id):
        raise ProblemError(
            ProblemCode.TOKEN_NOT_FOUND,
            f"There is no token {token_id[:40]!r}. Correct the id; `holdfast tokens list` shows them.",
        )
    return row[0], row[1]


_SOON = timedelta(days=7)


def ends_soon(token: Token, now: datetime) -> bool:
    """A tenth of its life is left, or less, and never more than a week."""
    return token.expires_at is not None and token.expires_at - now <= min(
        _SOON, (token.expires_at - token.created_at) / 10
    )
