"""The credential of a call: a token or a one-time code in `Authorization`, or the cookie of a session. Also when a
token was last used.

A browser adds the cookie to every call that any page makes to this host, so a call by cookie must also show that the
service's own page made it (rule csrf-before-write). The service sees that in the request's head alone, before it asks
the database.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from fastapi import Request
from sqlalchemy import update
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import CSRF_HEADER, SESSION_COOKIE
from holdfast_protocol.states import CredentialKind
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Token
from holdfast_service.errors import ProblemError

if TYPE_CHECKING:
    from holdfast_service.context import ServiceContext


_FORM = re.compile(r"^(?P<kind>[a-z]+)_(?P<id>[0-9a-f]{16})_(?P<secret>[0-9a-f]{64})\Z")


def new_text(kind: CredentialKind) -> str:
    """`<kind>_<id>_<secret>`: 64 and 256 random bits."""
    return f"{kind}_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


def parse(kind: CredentialKind, text: str) -> tuple[str, str]:
    """(id, SHA-256 of the secret). Raises ValueError for a text of another form; the error does not repeat the text."""
    match = _FORM.match(text)
    if match is None or match["kind"] != kind:
        raise ValueError(f"it has the form {kind}_, 16 lower-case hex digits, _ and 64 lower-case hex digits")
    return match["id"], hashlib.sha256(match["secret"].encode()).hexdigest()


def is_kind(kind: CredentialKind, text: str) -> bool:
    return text.startswith(f"{kind}_")


def refused(kind: CredentialKind, why: str) -> ProblemError:
    remedy = {
        CredentialKind.TOKEN: "Set HOLDFAST_TOKEN to a valid one; an administrator makes it with "
        "`holdfast tokens create`.",
        CredentialKind.SESSION: "Sign in again, with a token or by `holdfast ui`.",
        CredentialKind.CODE: "Run `holdfast ui` again: a code lives a minute and works once.",
    }[kind]
    name = "token" if kind is CredentialKind.TOKEN else kind.value
    return ProblemError(ProblemCode.UNAUTHENTICATED, f"The {name} {why}. {remedy}")


def credential_of(request: Request) -> str:
    """The text of a token, a code or a session. A session comes by cookie only, the others by `Authorization` only. If
    a call has both, `Authorization` counts. Raises `unauthenticated` and `csrf_failed`."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and (brought := text.strip()):
        if is_kind(CredentialKind.SESSION, brought):
            raise refused(CredentialKind.TOKEN, "is not a Holdfast token; it has the form hold_<id>_<secret>")
        return brought
    cookie = request.cookies.get(cookie_name(request))
    if not cookie:
        raise ProblemError(
            ProblemCode.UNAUTHENTICATED,
            "This call needs a token. Set HOLDFAST_TOKEN, or send `Authorization: Bearer hold_…`.",
        )
    if not is_kind(CredentialKind.SESSION, cookie):
        raise refused(CredentialKind.SESSION, "is not known")
    _check_own_page(request, cookie)
    return cookie


def is_secure(request: Request) -> bool:
    """The cookie is for https alone. The call itself may have come from a proxy that ends TLS and is not trusted, so
    the setting counts first."""
    return request.url.scheme == "https" or _public_origin(request).startswith("https:")


def _public_origin(request: Request) -> str:
    """Where people reach the service; empty: the settings do not say."""
    context: ServiceContext = request.app.state.context
    return context.settings.public_url or ""


def refuse_unless_cookie_fits(request: Request) -> None:
    """A session whose cookie would go over plain http though the page came over https, or that the browser would drop,
    is not opened. Raises `forbidden`."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    if "https" in (forwarded, _scheme_of_page(request)) and not is_secure(request):
        raise ProblemError(
            ProblemCode.FORBIDDEN,
            "The page came over https, and its call reached the service over http: a proxy that the service does not "
            "trust ends TLS, so the session's cookie would not be kept to https. Set HOLDFAST_PUBLIC_URL to the "
            "address of the page (https://…), or HOLDFAST_TRUSTED_PROXIES to that of the proxy, and let it send "
            "X-Forwarded-Proto.",
        )
    if is_secure(request) and _scheme_of_page(request) == "http":
        public = _public_origin(request)
        raise ProblemError(
            ProblemCode.FORBIDDEN,
            "The page came over plain http, where a browser does not keep the cookie of this service. Open it at "
            f"{public or 'its https address'}.",
        )


def _scheme_of_page(request: Request) -> str:
    """What a browser says of the page that calls; empty for a script."""
    return request.headers.get("origin", "").partition("://")[0].lower()


def cookie_name(request: Request, name: str = SESSION_COOKIE) -> str:
    """Over https with the prefix: a browser takes such a cookie from this very host and over https only, so no
    neighbour of its domain can put another's session in its place."""
    return f"__Host-{name}" if is_secure(request) else name


def csrf_token(cookie: str) -> str:
    """Made from the session's secret, so the catalog keeps nothing more. Only a page of this origin can read it."""
    return hmac.new(cookie.encode(), b"csrf", hashlib.sha256).hexdigest()


def _check_own_page(request: Request, cookie: str) -> None:
    refuse_other_pages(request)
    reads = request.method in ("GET", "HEAD")
    sent = request.headers.get(CSRF_HEADER, "")
    if not reads and not hmac.compare_digest(sent.encode(), csrf_token(cookie).encode()):
        raise ProblemError(
            ProblemCode.CSRF_FAILED,
            f"A call by cookie that may change something needs the header {CSRF_HEADER}. Read its value from "
            "GET /v1/sessions/current.",
        )


def refuse_other_pages(request: Request) -> None:
    """A cookie comes along from every port of this host too, whatever SameSite says; Sec-Fetch-Site and Origin know the
    port. Raises `csrf_failed`."""
    reads = request.method in ("GET", "HEAD")
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    # Over plain http to another machine a browser sends no Sec-Fetch-Site: the origin, with writes and scripts' reads.
    ours = (_own_origin(request), _public_origin(request))
    if site is None and origin is not None and origin.lower() not in ours:
        site = "cross-site"
    if site not in (None, "same-origin") and not (reads and site == "none"):
        raise ProblemError(
            ProblemCode.CSRF_FAILED,
            "Another page made this call in the name of the person who has signed in. Call with a token in "
            "`Authorization` instead.",
        )


def page_origin(request: Request) -> str:
    """Where the browser that calls has the page from: what the settings say, else this call's own scheme and host."""
    return _public_origin(request) or _own_origin(request)


def _own_origin(request: Request) -> str:
    """As a browser writes it: without the port that the scheme has anyway."""
    scheme, host = "https" if is_secure(request) else "http", request.headers.get("host", "").lower()
    return f"{scheme}://{host.removesuffix(':443' if scheme == 'https' else ':80')}"


EVERY_SECONDS = 300.0
"""A token that calls all the time costs one statement in so long, in each process."""


class TokensUsed:
    """The tokens that this process has let in and not written down yet. It writes them down now and then, and no call
    waits for it. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._new: set[str] = set()
        self._written_at: dict[str, float] = {}

    def add(self, token_id: str) -> None:
        with self._lock:
            if self._clock() - self._written_at.get(token_id, -inf) >= EVERY_SECONDS:
                self._new.add(token_id)

    def write_down(self, database: Database) -> int:
        """How many tokens. Raises ProblemError; they are written the next time then."""
        with self._lock:
            new = sorted(self._new)
        if not new:
            return 0
        database.run(lambda session: _write_last_use(session, new))
        with self._lock:
            now = self._clock()
            self._new.difference_update(new)
            lately = {token_id: at for token_id, at in self._written_at.items() if now - at < EVERY_SECONDS}
            self._written_at = lately | dict.fromkeys(new, now)
        return len(new)


def _write_last_use(session: Session, token_ids: Sequence[str]) -> None:
    session.execute(
        update(Token).where(Token.id.in_(token_ids)).values(last_used_at=database_now(session)),
        execution_options={"synchronize_session": False},
    )
