"""The HTTP application: routers, error replies and the frame around each request, over one context.

Nothing here decides anything. A route's file is `<room>/endpoints.py`; who may call it stands in its `require(scope)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

import holdfast_service.attached_stores.endpoints
import holdfast_service.audit.endpoints
import holdfast_service.auth.endpoints
import holdfast_service.background.endpoints
import holdfast_service.catalog_check.endpoints
import holdfast_service.collect.endpoints
import holdfast_service.comparisons.endpoints
import holdfast_service.curves.endpoints
import holdfast_service.events.endpoints
import holdfast_service.holds.endpoints
import holdfast_service.identity.endpoints
import holdfast_service.identity.sign_in_endpoints
import holdfast_service.insights.endpoints
import holdfast_service.operations.endpoints
import holdfast_service.policies.endpoints
import holdfast_service.rebuild.endpoints
import holdfast_service.replicate.endpoints
import holdfast_service.restore.endpoints
import holdfast_service.retention.endpoints
import holdfast_service.runs.endpoints
import holdfast_service.samples.endpoints
import holdfast_service.scrub.endpoints
import holdfast_service.tiers.endpoints
import holdfast_service.training.endpoints
import holdfast_service.ui.endpoints
import holdfast_service.usage.endpoints
import holdfast_service.web.health
import holdfast_service.webhooks.endpoints
from holdfast_service.attached_stores.metrics import StoreNumbers
from holdfast_service.auth.principal import FailedCalls
from holdfast_service.background.metrics import ControllerNumbers
from holdfast_service.background.registry import loops_of
from holdfast_service.context import ServiceContext
from holdfast_service.events.feed import EventFeed
from holdfast_service.identity.identities import IdentityNumbers
from holdfast_service.insights.metrics import RunNumbers
from holdfast_service.release import VERSION
from holdfast_service.replicate.metrics import CopyNumbers
from holdfast_service.runs.metrics import CatalogNumbers
from holdfast_service.scrub.metrics import ScrubNumbers
from holdfast_service.stores.posix.endpoints import SignedStore, TransferLimits, object_router
from holdfast_service.stores.posix.posix_store import PosixStore
from holdfast_service.stores.posix.signed_urls import key_of_role
from holdfast_service.usage.metrics import ByteNumbers
from holdfast_service.web.admission import Admission
from holdfast_service.web.certificate import CertificateNumbers, ClientCertificateCheck, ServedCertificate
from holdfast_service.web.connections import CallerBehindProxy, TrustedProxies
from holdfast_service.web.frame import (
    DocumentedRoute,
    HostCheck,
    ProtocolHeader,
    RequestFrame,
    RequestMeter,
    registry_of_requests,
)
from holdfast_service.web.health import SharedCheck, check_readiness
from holdfast_service.web.held_refusals import HeldRefusals
from holdfast_service.web.openapi import finished
from holdfast_service.web.problem_reply import install_problem_replies

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]

ROUTERS: tuple[APIRouter, ...] = (
    holdfast_service.training.endpoints.attempts_router,
    holdfast_service.training.endpoints.uploads_router,
    holdfast_service.training.endpoints.checkpoints_router,
    holdfast_service.restore.endpoints.router,
    holdfast_service.restore.endpoints.checkpoints_router,
    holdfast_service.runs.endpoints.service_router,
    holdfast_service.runs.endpoints.projects_router,
    holdfast_service.runs.endpoints.all_runs_router,
    holdfast_service.runs.endpoints.runs_router,
    holdfast_service.runs.endpoints.checkpoints_router,
    holdfast_service.comparisons.endpoints.router,
    holdfast_service.insights.endpoints.router,
    holdfast_service.curves.endpoints.router,
    holdfast_service.retention.endpoints.projects_router,
    holdfast_service.retention.endpoints.runs_router,
    holdfast_service.retention.endpoints.checkpoints_router,
    holdfast_service.retention.endpoints.retention_router,
    holdfast_service.policies.endpoints.router,
    holdfast_service.holds.endpoints.router,
    holdfast_service.replicate.endpoints.router,
    holdfast_service.scrub.endpoints.router,
    holdfast_service.tiers.endpoints.router,
    holdfast_service.usage.endpoints.router,
    holdfast_service.usage.endpoints.prices_router,
    holdfast_service.samples.endpoints.router,
    holdfast_service.collect.endpoints.collections_router,
    holdfast_service.collect.endpoints.sweeps_router,
    holdfast_service.attached_stores.endpoints.router,
    holdfast_service.catalog_check.endpoints.router,
    holdfast_service.catalog_check.endpoints.catalog_router,
    holdfast_service.rebuild.endpoints.router,
    holdfast_service.operations.endpoints.router,
    holdfast_service.background.endpoints.controllers_router,
    holdfast_service.background.endpoints.workers_router,
    holdfast_service.events.endpoints.router,
    holdfast_service.audit.endpoints.router,
    holdfast_service.webhooks.endpoints.router,
    holdfast_service.auth.endpoints.router,
    holdfast_service.identity.endpoints.router,
    holdfast_service.identity.sign_in_endpoints.router,
    holdfast_service.auth.endpoints.sessions_router,
    holdfast_service.ui.endpoints.router,
    holdfast_service.web.health.router,
    holdfast_service.web.health.metrics_router,
)
_OF_ONE_PROJECT = 8
"""This part of the connections may be transfers of one project's chunks. With its calls and streams, which have limits
of their own, no project takes all connections of a process."""

_ROUTES = [route for router in ROUTERS for route in router.routes]


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Made once: FastAPI keeps its own, which is finished in place."""
        if self.openapi_schema is None:
            self.openapi_schema = finished(super().openapi())
        return self.openapi_schema

    def setup(self) -> None:
        """The document's text is made once, too: to write a quarter of a megabyte holds up every other request."""

        @cache
        def document() -> bytes:
            return json.dumps(self.openapi(), separators=(",", ":")).encode()

        async def reply(_request: Request) -> Response:
            return Response(document(), media_type="application/json")

        self.add_route("/openapi.json", reply, include_in_schema=False)
        super().setup()


def _application(routes: list[BaseRoute], lifespan: Lifespan | None = None) -> _Application:
    return _Application(
        title="Holdfast",
        version=VERSION,
        summary="Checkpoint storage for GPU training: what was called committed can be restored, bit for bit.",
        # FastAPI's pages of documentation load scripts from elsewhere, and this origin holds the page's cookie.
        docs_url=None,
        redoc_url=None,
        routes=routes,
        lifespan=lifespan,
    )


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document without a running service: every route but those of a mounted store."""
    return _application(list(_ROUTES)).openapi()


def create_app(
    context: ServiceContext,
    *,
    lifespan: Lifespan | None = None,
    page_folder: Path = holdfast_service.ui.endpoints.BUILT_INTO,
    certificate: ServedCertificate | None = None,
) -> FastAPI:
    """`lifespan`: what the application's process does before the first request and after the last one. `page_folder`:
    the files of the web page. `certificate`: the one that the server in front of it shows."""
    mounted = [
        SignedStore(attached.store, key_of_role(context.signing_key, attached.role))
        for attached in context.stores
        if isinstance(attached.store, PosixStore)
    ]
    limits = TransferLimits(
        context.settings.longest_upload_seconds, max(1, context.settings.most_connections // _OF_ONE_PROJECT)
    )
    app = _application(
        [*_ROUTES, *(object_router(mounted, limits, DocumentedRoute).routes if mounted else [])], lifespan
    )
    app.state.context = context
    app.state.loops = loops_of(context.settings)
    app.state.failed_calls = FailedCalls()
    app.state.held_refusals = HeldRefusals()
    app.state.readiness = SharedCheck(partial(check_readiness, context))
    app.state.page_folder = page_folder
    app.state.event_feed = EventFeed(context.database, context.epoch)
    # One registry per application, not the library's global one: several can live in one process.
    app.state.metrics = CollectorRegistry()
    app.state.metrics.register(CatalogNumbers(context))
    app.state.metrics.register(StoreNumbers(context))
    app.state.metrics.register(ByteNumbers(context))
    app.state.metrics.register(CopyNumbers(context))
    app.state.metrics.register(ScrubNumbers(context))
    app.state.metrics.register(RunNumbers(context))
    app.state.metrics.register(ControllerNumbers(context, app.state.loops))
    if certificate is not None:
        app.state.metrics.register(CertificateNumbers(certificate))
    if context.identities is not None:
        app.state.metrics.register(IdentityNumbers(context.identities))
    of_requests = registry_of_requests(app.state.metrics)
    app.state.admission = Admission(context.settings, context.load, of_requests)
    install_problem_replies(app)
    # The last one added is the outermost: the frame gives the id that all others use, and logs who calls.
    app.add_middleware(ProtocolHeader)
    app.add_middleware(HostCheck, names=context.settings.host_names)
    settings = context.settings
    if certificate is not None and settings.tls_client_ca is not None and settings.tls_clients == "required":
        app.add_middleware(ClientCertificateCheck)
    app.add_middleware(RequestMeter, registry=of_requests)
    app.add_middleware(RequestFrame)
    app.add_middleware(CallerBehindProxy, trusted=TrustedProxies.of(settings))
    return app
