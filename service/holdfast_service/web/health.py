"""Whether the process lives and can serve, what it tells of itself, and its metrics.

`/healthz` and `/readyz` are open: they tell no secrets. `/healthz` runs on the event loop: it answers while every
thread waits for a database that does not. `/readyz` writes a row, because a standby that was not promoted, and a full
disk, answer every question and take no save. So there is one check at a time, however many strangers ask. `/metrics`
names projects and runs: only for a token with the scope `metrics` and for every project. Such a token reads nothing
else: a scraper's configuration holds no key to the data.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Generic, TypeVar

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from sqlalchemy import select

from holdfast_protocol.base import PROTOCOL_VERSION
from holdfast_protocol.codecs import Codec
from holdfast_protocol.service import Readiness, ReadinessCheck, ServerInfo
from holdfast_protocol.states import Scope, StoreRole
from holdfast_service.auth.principal import Principal, require
from holdfast_service.auth.tokens import ends_soon
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import what_can_be_lost
from holdfast_service.db.migrate import pending_revision
from holdfast_service.db.tables.core import CatalogIdentity, Token
from holdfast_service.errors import ProblemError
from holdfast_service.records.history import settle_history
from holdfast_service.release import VERSION
from holdfast_service.web.frame import DocumentedRoute, GuardedRoute
from holdfast_service.web.openapi import OPEN
from holdfast_service.work.processes import attached_here, say_alive, weaknesses_of, what_differs

router = APIRouter(route_class=DocumentedRoute, tags=["health"])


@router.get("/healthz", openapi_extra=OPEN, summary="Whether the process lives")
async def healthz() -> dict[str, str]:
    return {"status": "alive"}


@router.get(
    "/readyz",
    openapi_extra=OPEN,
    summary="Whether database, migrations and a store answer",
    responses={503: {"model": Readiness, "description": "One of them does not."}},
)
async def readyz(request: Request, response: Response) -> Readiness:
    shared: SharedCheck[Readiness] = request.app.state.readiness
    readiness = await shared.answer()
    if not readiness.ready:
        response.status_code = 503
    return readiness


LEAST_PAUSE_SECONDS = 0.1
AnswerT = TypeVar("AnswerT")


class SharedCheck(Generic[AnswerT]):
    """One check at a time, in a thread of its own, and some in a second at most (rule limits-before-work). Who asks
    while one is under way shares the next one with all who do: no answer is older than its question."""

    def __init__(self, check: Callable[[], AnswerT]) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._next: Future[AnswerT] | None = None
        self._runs = False
        self._began_at = float("-inf")

    async def answer(self) -> AnswerT:
        """Raises what the check raises."""
        with self._lock:
            if self._next is None:
                self._next = Future()
            asked = self._next
            begins, self._runs = not self._runs, True
        if begins:
            try:
                threading.Thread(target=self._work, name="holdfast-readiness", daemon=True).start()
            except RuntimeError as error:  # no thread can be started: the next caller tries again
                with self._lock:
                    self._next, self._runs = None, False
                asked.set_exception(error)
        return await asyncio.shield(asyncio.wrap_future(asked))  # others share it with a caller that has gone

    def _work(self) -> None:
        while True:
            time.sleep(max(self._began_at + LEAST_PAUSE_SECONDS - time.monotonic(), 0))
            with self._lock:
                asked, self._next = self._next, None
                if asked is None:
                    self._runs = False
                    return
            self._began_at = time.monotonic()
            try:
                asked.set_result(self._check())
            except BaseException as error:
                asked.set_exception(error)


def check_readiness(context: ServiceContext) -> Readiness:
    checks = [*_check_database(context), _check_stores(context)]
    ready = all(check.ok for check in checks)
    weak = weaknesses_of(context)
    return Readiness(
        ready=ready, checks=checks, warnings=[*_differences(context), *_identity_file(context), *weak], weaknesses=weak
    )


def _differences(context: ServiceContext) -> list[str]:
    try:
        with context.database.read() as session:
            return what_differs(session, context)
    except ProblemError:
        return []  # the checks say it


def _identity_file(context: ServiceContext) -> list[str]:
    if context.identities is None or context.identities.failure is None:
        return []
    return [
        "The last edit of HOLDFAST_IDENTITY_FILE cannot be used, and what it said before goes on. The service's log "
        "says what is wrong; correct it."
    ]


def _check_database(context: ServiceContext) -> list[ReadinessCheck]:
    try:
        with context.database.read() as session:
            epoch = session.scalar(select(CatalogIdentity.epoch))
            pending = pending_revision(session.connection())
            claim = context.claim if pending is not None else session.scalar(select(CatalogIdentity.claim))
        unwritable = _why_unwritable(context) if pending is None else None
    except ProblemError as error:
        return [
            ReadinessCheck(name="database", ok=False, detail=error.detail),
            ReadinessCheck(name="migrations", ok=False, detail="Unknown while the database does not answer."),
        ]
    if unwritable is not None:
        database = ReadinessCheck(name="database", ok=False, detail=unwritable)
    elif (epoch, claim) == (context.epoch, context.claim):
        database = _check_history(context)
    else:
        database = ReadinessCheck(
            name="database",
            ok=False,
            detail=f"The catalog is at epoch {epoch}, and this process began in {context.epoch}. Restart it.",
        )
    detail = "All applied." if pending is None else f"The revision {pending} is not applied. Restart the service."
    return [database, ReadinessCheck(name="migrations", ok=pending is None, detail=detail)]


def _check_history(context: ServiceContext) -> ReadinessCheck:
    """Also what its settings can lose: that is a warning, and nothing to stop for."""
    try:
        settle_history(context)
        lossy = what_can_be_lost(context.database)
    except ProblemError as error:
        return ReadinessCheck(name="database", ok=False, detail=error.detail)
    return ReadinessCheck(name="database", ok=True, detail=" ".join(["It answers and takes writes.", *lossy]))


def _why_unwritable(context: ServiceContext) -> str | None:
    """None if a write was committed just now: that of this process's own row, which says that it serves."""
    try:
        with context.database.transaction() as session:
            say_alive(session, context.process_id, "serve", attached_here(context))
    except ProblemError as error:
        return error.detail
    return None


def _check_stores(context: ServiceContext) -> ReadinessCheck:
    """With one of several unavailable the service still gives back what the others hold: it must go on being asked."""
    problems = {attached.role: attached.watch.check() for attached in context.stores}
    ok = None in problems.values()
    if len(problems) == 1:
        return ReadinessCheck(name="store", ok=ok, detail=problems[StoreRole.PRIMARY] or "It answers.")
    told = [f"{role}: {problem or 'It answers.'}" for role, problem in problems.items()]
    return ReadinessCheck(name="store", ok=ok, detail=" ".join(told))


def server_info(context: ServiceContext, caller: Principal) -> ServerInfo:
    """What the service tells a client about itself and about the client's own token."""
    capabilities = context.store.capabilities
    with context.database.read() as session:
        now = database_now(session)
        token = session.get_one(Token, caller.token_id)
    return ServerInfo(
        version=VERSION,
        protocol=PROTOCOL_VERSION,
        catalog_id=context.catalog_id,
        epoch=context.epoch,
        now=now,
        store_kind=context.store.kind,
        codecs=[codec.value for codec in Codec],
        store_asks_md5=capabilities is not None and capabilities.asks_md5,
        token_name=caller.name,
        token_project=caller.project_name,
        token_scopes=sorted(caller.scopes),
        token_id=token.id,
        token_expires_at=token.expires_at,
        token_ends_soon=ends_soon(token, now),
    )


metrics_router = APIRouter(route_class=GuardedRoute, tags=["health"])


@metrics_router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
def metrics(
    request: Request, caller: Annotated[Principal, require(Scope.METRICS, from_memory=True, every_project=True)]
) -> Response:
    del caller
    registry: CollectorRegistry = request.app.state.metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=content_type)
