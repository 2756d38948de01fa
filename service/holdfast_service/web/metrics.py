"""`/metrics`: Prometheus text. It names projects and runs: only for a token with the scope `metrics` and for every
project. Such a token reads nothing else, so that a scraper's configuration holds no key to the data."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal, require
from holdfast_service.web.frame import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["health"])


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
def metrics(request: Request, caller: Annotated[Principal, require(Scope.METRICS, from_memory=True)]) -> Response:
    caller.check_every_project()
    registry: CollectorRegistry = request.app.state.metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=content_type)
