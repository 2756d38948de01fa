"""`/metrics`: Prometheus text. Open, for scrapers have no tokens; it names projects and runs, so show the port to
no stranger."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

router = APIRouter(tags=["health"])


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
def metrics(request: Request) -> Response:
    registry: CollectorRegistry = request.app.state.metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=content_type)
