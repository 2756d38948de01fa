"""Who is calling, and what the token may do: from what a call brings to the caller of a route."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Executable, Row, bindparam, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CredentialKind, Scope
from holdfast_service.auth.credentials import credential_of, is_kind, new_text, parse, refused
from holdfast_service.db.dialect import clock, database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Project, Token
from holdfast_service.db.tables.sign_ins import SignIn
from holdfast_service.errors import ProblemError

if TYPE_CHECKING:
    from holdfast_service.context import ServiceContext


@dataclass(frozen=True)
class Principal:
    """`project_id` None: the token is good for every project. `session_id`: the session that stands for the token.
    `identity`: the one that got the token by an exchange. The last two are the token's own limits; None: those of the
    settings."""

    token_id: str
    name: str
    scopes: frozenset[Scope]
    project_id: str | None = None
    project_name: str | None = None
    session_id: str | None = None
    identity: str | None = None
    requests_per_second: float | None = None
    concurrent_requests: int | None = None

    @property
    def counted_as(self) -> str:
        """Whose calls are counted together: else each exchange would bring an identity's calls limits of their own."""
        return self.identity or self.token_id

    def sees_project(self, project_id: str) -> bool:
        return self.project_id is None or self.project_id == project_id

    def check_every_project(self) -> None:
        """For what concerns all projects at once."""
        if self.project_id is not None:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {self.name!r} belongs to the project {self.project_name!r}, and this concerns every "
                "project. Use a token that is good for all of them.",
            )

    def check_scope(self, scope: Scope) -> None:
        if scope not in self.scopes:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {self.name!r} lacks the scope {scope.value!r}. Use one that has it, or ask an "
                f"administrator for `holdfast tokens create --scope {scope.value}`.",
                scope=scope.value,
            )

    def check_project_name(self, project: str) -> None:
        if self.project_name is not None and self.project_name != project:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {self.name!r} belongs to the project {self.project_name!r} and not to {project!r}. "
                "Correct the project's name, or use a token of that project.",
                project=project,
            )


# A random secret of 64 hex digits has about 14 of the 16 digits many times; typed-in ones and repetitions do not.
_LEAST_DISTINCT_DIGITS = 10


_LEAST_DISTINCT_PAIRS = 32


def new_token_text() -> str:
    """`hold_<id>_<secret>`: 64 and 256 random bits."""
    return new_text(CredentialKind.TOKEN)


def parse_token(text: str) -> tuple[str, str]:
    """(id, SHA-256 of the secret). Raises ValueError for anything that is not a token; it does not repeat the text."""
    return parse(CredentialKind.TOKEN, text)


def check_entropy(text: str) -> None:
    """Raises ValueError for a token that a person made up. Only for tokens that come from outside."""
    parse_token(text)
    secret = text.rpartition("_")[2]
    pairs = {secret[at : at + 2] for at in range(len(secret) - 1)}
    if len(set(secret)) < _LEAST_DISTINCT_DIGITS or len(pairs) < _LEAST_DISTINCT_PAIRS:
        raise ValueError(
            "its secret is not random; make one with `python -c 'import secrets; "
            'print(f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}")\'`'
        )


# Slows down who calls with wrong tokens: each costs a question to the database.
#
# An address may fail BURST times, and then once in SECONDS_PER_FAILURE. A token that was good lately is still asked
# for: behind one address may be a whole cluster, and one job's old token must not stop the training of the others. Kept
# by each process for itself, in memory.
#
# A page that is left open sends the cookie of a session that has ended again and again, and the next person to sign in
# from that address must not pay for it. So a cookie counts once: what it was told the first time is remembered, and
# costs no question. That it has expired is asked again now and then, because the database's clock may have been ahead.
# Cookies have tries of their own, and more of them, since many people share an address.

BURST = 20
SECONDS_PER_FAILURE = 3.0
SESSIONS_BURST = 200
SECONDS_PER_SESSION = 1.0
ADMITTED_SECONDS = 60.0
"""So long after it was looked at, a token is let in to work that looks at it itself."""
EXPIRED_SECONDS = 60.0
"""So long an expired session is refused without a question."""
_EXPIRED = "has expired"
_MOST_KEPT = 10_000
_NETWORK_BITS = 64

_FAILED_IDENTITY = frozenset(
    {
        ProblemCode.IDENTITY_TOKEN_INVALID,
        ProblemCode.IDENTITY_TOKEN_EXPIRED,
        ProblemCode.IDENTITY_TOKEN_EARLY,
        ProblemCode.IDENTITY_TOKEN_USED,
        ProblemCode.IDENTITY_ISSUER_UNKNOWN,
        ProblemCode.IDENTITY_AUDIENCE_WRONG,
        ProblemCode.IDENTITY_NOT_GRANTED,
        ProblemCode.IDENTITY_KEY_UNKNOWN,
        ProblemCode.SIGN_IN_FAILED,
    }
)

KeptT = TypeVar("KeptT")


class _Good(NamedTuple):
    caller: Principal
    seen_at: float


class _Ended(NamedTuple):
    told: str
    ask_again_at: float


@dataclass
class Tries:
    """By network, when its failures will all be forgotten: each adds `seconds_per_failure` to what is left."""

    burst: int
    seconds_per_failure: float
    forgotten_at: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def wait_seconds(self, network: str, now: float) -> float:
        """Until the next try. Not above 0: now."""
        return self.forgotten_at.get(network, 0.0) - now - (self.burst - 1) * self.seconds_per_failure

    def count_failure(self, network: str, now: float) -> None:
        keep_newest(
            self.forgotten_at, network, max(now, self.forgotten_at.get(network, now)) + self.seconds_per_failure
        )

    def take_back(self, network: str) -> None:
        if network in self.forgotten_at:
            self.forgotten_at[network] -= self.seconds_per_failure


class FailedCalls:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = Tries(BURST, SECONDS_PER_FAILURE)
        self._sessions = Tries(SESSIONS_BURST, SECONDS_PER_SESSION)
        self._identities = Tries(BURST, SECONDS_PER_FAILURE)
        self._good: OrderedDict[str, _Good] = OrderedDict()
        self._exchanged: OrderedDict[str, bool] = OrderedDict()
        self._made: OrderedDict[str, bool] = OrderedDict()  # by this process, for identities
        self._ended: OrderedDict[str, _Ended] = OrderedDict()  # what such a cookie was told

    def authenticated(self, address: str, token: str, ask: Callable[[str], Principal]) -> Principal:
        """`ask(token)`, counted. Raises before it what `refuse_early` raises."""
        self.refuse_early(address, token)
        fingerprint = _fingerprint(token)
        try:
            caller = ask(token)
        except ProblemError as error:
            if error.code is ProblemCode.UNAUTHENTICATED:
                self._failed(address, fingerprint, token, error.detail)
            raise
        if not is_kind(CredentialKind.CODE, token):  # it works once, and would take a token's place
            with self._lock:
                keep_newest(self._good, fingerprint, _Good(caller, self._clock()))
        return caller

    def last_known(self, token: str, *, within_seconds: float = inf) -> Principal | None:
        """Who came with this token when it was last looked at; None: that was earlier, or it was not good."""
        with self._lock:
            good = self._good.get(_fingerprint(token))
            return None if good is None or self._clock() - good.seen_at > within_seconds else good.caller

    def refuse_early(self, address: str, token: str) -> None:
        """Asks no database. Raises `too_many_failures` where this address has used up its tries, and `unauthenticated`
        for a session that is known to have ended."""
        fingerprint = _fingerprint(token)
        tries = self._tries_of(token)
        with self._lock:
            ended, now = self._ended.get(fingerprint), self._clock()
            if ended is not None and now >= ended.ask_again_at:
                return
            wait = tries.wait_seconds(network_of(address), now)
            if ended is None and (wait <= 0 or fingerprint in self._good or fingerprint in self._made):
                return
        if ended is not None:
            raise ProblemError(ProblemCode.UNAUTHENTICATED, ended.told)
        what, remedy = ("session", "Sign in again") if tries is self._sessions else ("token", "Correct HOLDFAST_TOKEN")
        raise ProblemError(
            ProblemCode.TOO_MANY_FAILURES,
            f"Too many calls from {address} had a {what} that is not valid. {remedy} there; the next try is looked at "
            f"in {ceil(wait)} s.",
            retry_after_seconds=ceil(wait),
        )

    def must_wait(self, address: str, identity_token: str) -> float:
        """Seconds until a token of another issuer from there is looked at; not above 0: now. One that was good lately
        is looked at in any case."""
        with self._lock:
            if _fingerprint(identity_token) in self._exchanged:
                return 0.0
            return self._identities.wait_seconds(network_of(address), self._clock())

    def made(self, token: str) -> None:
        """For a verified identity: it is good, though no call has shown it yet."""
        with self._lock:
            keep_newest(self._made, _fingerprint(token), True)

    @contextmanager
    def counted(
        self, address: str, identity_token: str, *, proven: bool = False, ahead: bool = False
    ) -> Iterator[None]:
        """Around the work for who brings a token of another issuer in place of one of this service. Such tokens have
        tries of their own. `proven`: it is looked at in any case, because a known key has signed it for somebody whom a
        rule knows: a job that renews has a new one each time, and a neighbour's wrong ones must not stop it. `ahead`:
        it counts as failed until it is known to be good, because many at once would all be looked at before the first
        has failed. Raises `too_many_failures`."""
        fingerprint, network = _fingerprint(identity_token), network_of(address)
        wait = 0.0 if proven else self.must_wait(address, identity_token)
        if wait > 0:
            raise ProblemError(
                ProblemCode.TOO_MANY_FAILURES,
                f"Too many tokens of identities from {address} were not taken. See there why the first one was not; "
                f"the next try is looked at in {ceil(wait)} s.",
                retry_after_seconds=ceil(wait),
            )
        if ahead:
            with self._lock:
                self._identities.count_failure(network, self._clock())
        failed = False
        try:
            yield
        except ProblemError as error:
            failed = error.code in _FAILED_IDENTITY
            raise
        else:
            with self._lock:
                keep_newest(self._exchanged, fingerprint, True)
        finally:
            with self._lock:
                if failed:
                    self._exchanged.pop(fingerprint, None)
                if failed and not ahead:
                    self._identities.count_failure(network, self._clock())
                if ahead and not failed:
                    self._identities.take_back(network)

    def _failed(self, address: str, fingerprint: str, token: str, told: str) -> None:
        tries = self._tries_of(token)
        with self._lock:
            self._good.pop(fingerprint, None)
            self._made.pop(fingerprint, None)
            now = self._clock()
            if fingerprint not in self._ended:
                tries.count_failure(network_of(address), now)
            if tries is self._sessions:
                again_at = now + EXPIRED_SECONDS if _EXPIRED in told else inf
                keep_newest(self._ended, fingerprint, _Ended(told, again_at))

    def _tries_of(self, token: str) -> Tries:
        return self._sessions if is_kind(CredentialKind.SESSION, token) else self._tokens


def network_of(address: str) -> str:
    """Whose tries they are: an IPv4 address, or the network of an IPv6 one, since each machine has 2^64 of these."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(known), _NETWORK_BITS), strict=False))


def _fingerprint(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def keep_newest(kept: OrderedDict[str, KeptT], key: str, value: KeptT) -> None:
    """The newest `_MOST_KEPT` of them: neither addresses nor tokens of strangers fill the memory."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _MOST_KEPT:
        kept.popitem(last=False)


# From a token's text to the caller. Only the SHA-256 of the secret is kept; comparison takes constant time.

_TOKEN = (
    select(Token, Project.name, clock())
    .outerjoin(Project, Project.id == Token.project_id)
    .where(Token.id == bindparam("token_id"))
)


def authenticate(database: Database, text: str) -> Principal:
    """Raises `unauthenticated`; the sentence does not tell a wrong secret from an unknown id."""
    for kind in (CredentialKind.SESSION, CredentialKind.CODE):
        if is_kind(kind, text):
            return _authenticate_sign_in(database, kind, text)
    try:
        token_id, offered = parse_token(text)
    except ValueError:
        raise _refused("is not a Holdfast token; it has the form hold_<id>_<secret>") from None
    with database.read(in_transaction=False) as session:
        row = session.execute(_TOKEN, {"token_id": token_id}).one_or_none()
        if row is None or not hmac.compare_digest(offered, row[0].secret_sha256):
            raise _refused("is not known")
        token, project_name, read = row
        _refuse_if_over(token.revoked_at, token.expires_at, database_now(session, read))
        return _principal(token, project_name)


def _authenticate_sign_in(database: Database, kind: CredentialKind, text: str) -> Principal:
    """The caller is its token's, as that is now."""
    try:
        sign_in_id, offered = parse(kind, text)
    except ValueError:
        raise refused(kind, "is not known") from None
    with database.read(in_transaction=False) as session:
        row = session.execute(
            select(SignIn.secret_sha256, SignIn.expires_at, Token, Project.name, clock())
            .join(Token, Token.id == SignIn.token_id)
            .outerjoin(Project, Project.id == Token.project_id)
            .where(SignIn.id == sign_in_id, SignIn.kind == kind.value)
        ).one_or_none()
        if row is None or not hmac.compare_digest(offered, row[0]):
            raise refused(kind, "is not known, or has ended")
        _, expires_at, token, project_name, read = row
        now = database_now(session, read)
        if expires_at <= now:
            raise refused(kind, _EXPIRED)
        _refuse_if_over(token.revoked_at, token.expires_at, now)
        return _principal(token, project_name, sign_in_id if kind is CredentialKind.SESSION else None)


def _principal(token: Token, project_name: str | None, session_id: str | None = None) -> Principal:
    return Principal(
        token_id=token.id,
        name=token.name,
        scopes=frozenset(Scope(scope) for scope in token.scopes),
        project_id=token.project_id,
        project_name=project_name,
        session_id=session_id,
        identity=None if token.issuer is None else f"{token.subject} of {token.issuer}",
        requests_per_second=token.requests_per_second,
        concurrent_requests=token.concurrent_requests,
    )


# In the transaction of a training job's call: its own first statement looks at the token too, which spares the call a
# question of its own before the work.

CALLERS_TOKEN = Token.id == bindparam("token_id")
TOKEN_COLUMNS = (
    Token.revoked_at.label("token_revoked_at"),
    Token.expires_at.label("token_expires_at"),
    clock().label("token_clock"),
)
_ALONE = select(*TOKEN_COLUMNS).where(CALLERS_TOKEN)


def execute_for_caller(
    session: Session, caller: Principal, statement: Executable, names: Mapping[str, object]
) -> Row[Any] | None:
    """The statement's one row, with its objects read anew. It joins Token by CALLERS_TOKEN and reads TOKEN_COLUMNS too.
    Raises `unauthenticated`, whether there is a row or not."""
    values = {**names, "token_id": caller.token_id}
    row = session.execute(statement, values, execution_options={"populate_existing": True}).one_or_none()
    token = row or session.execute(_ALONE, values).one_or_none()
    if token is None:
        raise _refused("is not known")
    _refuse_if_over(token.token_revoked_at, token.token_expires_at, database_now(session, token.token_clock))
    return row


def _refuse_if_over(revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> None:
    if revoked_at is not None:
        raise _refused("was revoked")
    if expires_at is not None and expires_at <= now:
        raise _refused(_EXPIRED)


def _refused(why: str) -> ProblemError:
    return refused(CredentialKind.TOKEN, why)


# `require(scope)`: the dependency that every route but the open ones declares.
#
#     router = APIRouter(route_class=GuardedRoute)
#
#     @router.get("/v1/…")
#     def read(caller: Annotated[Principal, require(Scope.READ)]) -> …
#
# The route itself asks for the caller before it reads the body (`web/frame.py`); the dependency hands the
# caller on, and no route has one that did not ask. A test walks the routes and fails on one without a RequireScope.


@dataclass(frozen=True)
class RequireScope:
    """`scope` None: any valid token. `or_scope`: one that is as good.
    `from_memory`: while the database is unavailable, a token that was let in before is let in again, and a session
    never.
    `work_looks`: the call's work asks for the token itself, by `execute_for_caller`, before it does or tells anything.
    `takes_code`: a one-time code is as good as the token that has made it.
    `every_project`: the call concerns all projects at once, and no token of one of them may make it.
    """

    scope: Scope | None
    or_scope: Scope | None = None
    from_memory: bool = False
    work_looks: bool = False
    takes_code: bool = False
    every_project: bool = False

    async def __call__(self, request: Request) -> Principal:
        caller: Principal = request.state.caller
        return caller

    def admitted(self, request: Request) -> Principal | None:
        """Who may go on to work that looks at the token itself; None: `caller_of` is to be asked. Asks no database.
        Raises `unauthenticated`, `csrf_failed` and `forbidden`."""
        credential = self._credential_of(request)
        if not self.work_looks or is_kind(CredentialKind.SESSION, credential):  # the work looks at no session
            return None
        failed_calls: FailedCalls = request.app.state.failed_calls
        principal = failed_calls.last_known(credential, within_seconds=ADMITTED_SECONDS)
        if principal is not None:
            self._check_scope(principal)
        return principal

    def caller_of(self, request: Request) -> Principal:
        """From the request's head alone; asks the database. Raises `unauthenticated`, `csrf_failed`, `forbidden` and
        `too_many_failures`."""
        context: ServiceContext = request.app.state.context
        failed_calls: FailedCalls = request.app.state.failed_calls
        credential = self._credential_of(request)
        try:
            principal = failed_calls.authenticated(
                address_of(request), credential, partial(authenticate, context.database)
            )
        except ProblemError as error:
            remembered = self.from_memory and not is_kind(CredentialKind.SESSION, credential)  # it may have ended since
            known = failed_calls.last_known(credential) if remembered else None
            if known is None or error.code is not ProblemCode.DATABASE_UNAVAILABLE:
                raise
            principal = known
        context.tokens_used.add(principal.token_id)
        self._check_scope(principal)
        return principal

    def _check_scope(self, caller: Principal) -> None:
        if self.scope is not None and self.or_scope not in caller.scopes:
            caller.check_scope(self.scope)
        if self.every_project:
            caller.check_every_project()

    def _credential_of(self, request: Request) -> str:
        credential = credential_of(request)
        if is_kind(CredentialKind.CODE, credential) and not self.takes_code:
            raise refused(CredentialKind.CODE, "opens a session, and is good for nothing else")
        return credential


def last_known(request: Request) -> Principal | None:
    """Who came with this credential when it was last good. It says nothing of now: only for whose turn it is. A flood
    of wrong ones ends here: it takes no turn, no thread and no statement. Raises `unauthenticated` for a call without a
    credential, `csrf_failed` and `too_many_failures`."""
    failed_calls: FailedCalls = request.app.state.failed_calls
    credential = credential_of(request)
    known = failed_calls.last_known(credential)
    if known is None:
        failed_calls.refuse_early(address_of(request), credential)
    return known


def address_of(request: Request) -> str:
    """The caller's; empty for one that came by a Unix socket and whose proxy says nothing."""
    return "" if request.client is None else request.client.host


def require(
    scope: Scope | None,
    *,
    or_scope: Scope | None = None,
    from_memory: bool = False,
    work_looks: bool = False,
    takes_code: bool = False,
    every_project: bool = False,
) -> Any:
    return Depends(RequireScope(scope, or_scope, from_memory, work_looks, takes_code, every_project))
