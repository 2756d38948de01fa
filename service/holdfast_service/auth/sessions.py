"""Sessions of the web page, and the one-time codes that open one in place of a token (rule session-is-its-token).

A row says which token it stands for, and until when. What it may do is asked of that token's row at each call, so it
ends with the token. A session opens no other session and makes no code, so it does not prolong itself. A session of an
administrator's token can make a token, as that token can, and the audit event names the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from fastapi import Request, Response
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import SIGN_IN_CODE_SECONDS, SessionView, SignInCode
from holdfast_protocol.states import CredentialKind
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.credentials import (
    cookie_name,
    credential_of,
    csrf_token,
    is_kind,
    is_secure,
    new_text,
    parse,
    refused,
)
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Token
from holdfast_service.db.tables.sign_ins import SignIn
from holdfast_service.errors import ProblemError

MOST_OF_A_TOKEN = {CredentialKind.SESSION: 50, CredentialKind.CODE: 10}
"""At once; one more ends the oldest."""


def open_session(context: ServiceContext, caller: Principal, request: Request, response: Response) -> SessionView:
    """Opens a session of the caller's token, uses the code up if the call came with one, and sets the cookie. Raises
    `unauthenticated` for a code that another call has used, and `forbidden` for a session."""
    _refuse_a_session(caller)
    brought = credential_of(request)
    cookie = new_text(CredentialKind.SESSION)
    with context.database.transaction() as session:
        if is_kind(CredentialKind.CODE, brought):
            _use_up(session, brought)
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
            after={"session": row.id, "by": "code" if is_kind(CredentialKind.CODE, brought) else "token"},
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
