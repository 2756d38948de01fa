"""Sessions of the web page, and the one-time codes that open one in place of a token (rule session-is-its-token).

A row says which token it stands for, and until when. What it may do is asked of that token's row at each call, so it
ends with the token. A session opens no other session and makes no code, so it does not prolong itself. A session of an
administrator's token can make a token, as that token can, and the audit event names the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from fastapi import Request, Response
from sqlalchemy import Select, delete, select, tuple_
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import SIGN_IN_CODE_SECONDS, OpenSession, SessionView, SignInCode
from holdfast_protocol.states import CredentialKind, Scope
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.credentials import (
    cookie_name,
    credential_of,
    csrf_token,
    is_kind,
    is_secure,
    new_text,
    parse,
    refuse_unless_cookie_fits,
    refused,
)
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.db.tables.core import Project, Token
from holdfast_service.db.tables.sign_ins import SignIn
from holdfast_service.errors import ProblemError

MOST_OF_A_TOKEN = {CredentialKind.SESSION: 50, CredentialKind.CODE: 10}
"""At once; one more ends the oldest."""


def open_session(context: ServiceContext, caller: Principal, request: Request, response: Response) -> SessionView:
    """Opens a session of the caller's token, uses the code up if the call came with one, and sets the cookie. Raises
    `unauthenticated` for a code that another call has used, and `forbidden` for a session and for a page whose browser
    would not keep the cookie to https, or not at all."""
    _refuse_a_session(caller)
    refuse_unless_cookie_fits(request)
    brought = credential_of(request)
    code = brought if is_kind(CredentialKind.CODE, brought) else None
    return _open(context, caller, request, response, by="token" if code is None else "code", code=code)


def open_for_identity(context: ServiceContext, caller: Principal, request: Request, response: Response) -> SessionView:
    """The same for a token that this call has made for who signs in at a provider, and whose text nobody has."""
    return _open(context, caller, request, response, by="identity")


def _open(
    context: ServiceContext,
    caller: Principal,
    request: Request,
    response: Response,
    *,
    by: str,
    code: str | None = None,
) -> SessionView:
    cookie = new_text(CredentialKind.SESSION)
    with context.database.transaction() as session:
        if code is not None:
            _use_up(session, code)
        row = _insert(session, caller, cookie, CredentialKind.SESSION, timedelta(hours=context.settings.session_hours))
        for ended in _end_oldest(session, caller, CredentialKind.SESSION):
            record_event(
                session,
                Actor.person(caller),
                "session.end",
                project_id=caller.project_id,
                reason="Its token has opened too many later ones.",
                before={"session": ended},
            )
        record_event(
            session,
            Actor.person(caller),
            "session.open",
            project_id=caller.project_id,
            after={"session": row.id, "by": by},
        )
        view = _view(caller, row, cookie)
        seconds = int((row.expires_at - row.created_at).total_seconds())
    _set_cookie(request, response, cookie, seconds)
    return view


def show_session(context: ServiceContext, caller: Principal, request: Request) -> SessionView:
    """The call's own session. Raises `session_not_found` for a call by token, and `unauthenticated` if it has ended."""
    session_id = _session_of(caller)
    with context.database.read() as session:
        row = session.get(SignIn, session_id)
        if row is None:
            raise refused(CredentialKind.SESSION, "has ended")
        return _view(caller, row, credential_of(request))


def end_session(context: ServiceContext, caller: Principal, request: Request, response: Response) -> None:
    """Ends the call's own session at once, and takes its cookie back. Raises `session_not_found`."""
    session_id = _session_of(caller)
    with context.database.transaction() as session:
        session.execute(delete(SignIn).where(SignIn.id == session_id))
        record_event(
            session,
            Actor.person(caller),
            "session.end",
            project_id=caller.project_id,
            before={"session": session_id},
        )
    _set_cookie(request, response, "", 0)


_CURSOR = "sessions"


def list_sessions(context: ServiceContext, caller: Principal, *, cursor: str | None, limit: int) -> Page[OpenSession]:
    """The sessions that can call now and that the caller may end, the newest first."""
    query = _open_sessions(caller).order_by(SignIn.created_at.desc(), SignIn.id.desc()).limit(limit + 1)
    if cursor is not None:
        created_at, session_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(SignIn.created_at, SignIn.id) < tuple_(moment_from_text(created_at), session_id))
    with context.database.read() as session:
        found = session.execute(query.where(SignIn.expires_at > database_now(session))).all()
    rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (moment_to_text(row[0].created_at), row[0].id))
    return Page(items=[_open_session(caller, *row) for row in rows], next_cursor=next_cursor)


def revoke_session(context: ServiceContext, caller: Principal, session_id: str) -> OpenSession:
    """Ends a session: the next call with its cookie is refused. Raises `session_not_found`, also if it has ended, or
    the caller may not know of it."""
    with context.database.transaction() as session:
        wanted = _open_sessions(caller).where(SignIn.id == session_id, SignIn.expires_at > database_now(session))
        row = session.execute(wanted.with_for_update(of=SignIn)).one_or_none()
        if row is None:
            raise ProblemError(
                ProblemCode.SESSION_NOT_FOUND,
                f"There is no session {session_id[:40]!r}, or it has ended. `holdfast sessions list` shows those that "
                "are open.",
            )
        found, token, project = row
        view = _open_session(caller, found, token, project)
        session.execute(delete(SignIn).where(SignIn.id == found.id))
        record_event(
            session,
            Actor.person(caller),
            "session.end",
            project_id=token.project_id,
            before={"session": found.id, "token": token.id, "name": token.name},
        )
        return view


def _open_sessions(caller: Principal) -> Select[SignIn, Token, str]:
    """Those of the caller's own token; for who operates the service those of every token, or of its project's."""
    query = (
        select(SignIn, Token, Project.name)
        .join(Token, Token.id == SignIn.token_id)
        .outerjoin(Project, Project.id == Token.project_id)
        .where(SignIn.kind == CredentialKind.SESSION.value, Token.revoked_at.is_(None))
    )
    if caller.scopes.isdisjoint((Scope.OPERATE, Scope.ADMIN)):
        return query.where(SignIn.token_id == caller.token_id)
    return query if caller.project_id is None else query.where(Token.project_id == caller.project_id)


def _open_session(caller: Principal, row: SignIn, token: Token, project: str | None) -> OpenSession:
    return OpenSession(
        id=row.id,
        token_id=token.id,
        name=token.name,
        project=project,
        created_at=row.created_at,
        expires_at=row.expires_at,
        current=row.id == caller.session_id,
    )


def make_sign_in_code(context: ServiceContext, caller: Principal) -> SignInCode:
    """A code that opens one session of the caller's token. Raises `forbidden` for a session."""
    _refuse_a_session(caller)
    text = new_text(CredentialKind.CODE)
    with context.database.transaction() as session:
        row = _insert(session, caller, text, CredentialKind.CODE, timedelta(seconds=SIGN_IN_CODE_SECONDS))
        _end_oldest(session, caller, CredentialKind.CODE)
        return SignInCode(code=text, expires_at=row.expires_at)


def _insert(session: Session, caller: Principal, text: str, kind: CredentialKind, life: timedelta) -> SignIn:
    """The row of a session or a code that ends no later than its token."""
    sign_in_id, secret_sha256 = parse(kind, text)
    now = database_now(session)
    token_ends = session.execute(select(Token.expires_at).where(Token.id == caller.token_id)).scalar_one()
    row = SignIn(
        id=sign_in_id,
        kind=kind.value,
        token_id=caller.token_id,
        secret_sha256=secret_sha256,
        created_at=now,
        expires_at=now + life if token_ends is None else min(now + life, token_ends),
    )
    session.add(row)
    session.flush()
    return row


def _use_up(session: Session, code: str) -> None:
    """One call deletes the row; a second one at the same time, through another service, finds none."""
    used = session.execute(
        delete(SignIn)
        .where(SignIn.id == parse(CredentialKind.CODE, code)[0], SignIn.kind == CredentialKind.CODE.value)
        .returning(SignIn.id)
    ).one_or_none()
    if used is None:
        raise refused(CredentialKind.CODE, "was used already")


def _end_oldest(session: Session, caller: Principal, kind: CredentialKind) -> Sequence[str]:
    """The ids of those that ended by it."""
    mine = (SignIn.token_id == caller.token_id, SignIn.kind == kind.value)
    newest_first = (SignIn.created_at.desc(), SignIn.id)
    too_many = select(SignIn.id).where(*mine).order_by(*newest_first).offset(MOST_OF_A_TOKEN[kind])
    ended = delete(SignIn).where(SignIn.id.in_(too_many)).returning(SignIn.id)
    return session.scalars(ended, execution_options={"synchronize_session": False}).all()


def _session_of(caller: Principal) -> str:
    if caller.session_id is None:
        raise ProblemError(
            ProblemCode.SESSION_NOT_FOUND,
            "This call came with a token, and not with the cookie of a session. POST /v1/sessions opens one.",
        )
    return caller.session_id


def _refuse_a_session(caller: Principal) -> None:
    if caller.session_id is not None:
        raise ProblemError(
            ProblemCode.FORBIDDEN,
            "A session opens no other one. Sign in with a token, or by `holdfast ui`.",
        )


def _view(caller: Principal, row: SignIn, cookie: str) -> SessionView:
    return SessionView(
        id=row.id,
        token_id=caller.token_id,
        name=caller.name,
        project=caller.project_name,
        scopes=sorted(caller.scopes),
        csrf_token=csrf_token(cookie),
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def _set_cookie(request: Request, response: Response, cookie: str, seconds: int) -> None:
    """The cookie is out of reach of scripts, and of pages of other sites."""
    response.set_cookie(
        cookie_name(request),
        cookie,
        max_age=seconds,
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )
