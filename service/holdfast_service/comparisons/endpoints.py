"""The route that has the tensors of two checkpoints read and measured."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.comparison.values import CompareValues
from holdfast_protocol.service import OperationView
from holdfast_service.comparisons.compare_values import start_comparison
from holdfast_service.context import Context
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import IdempotencyKey, Operator

router = APIRouter(route_class=GuardedRoute, tags=["checkpoints"])


@router.post(
    "/v1/checkpoints/{checkpoint_id}/comparisons",
    status_code=202,
    name="compare_values",
    summary="Read the tensors that differ from another checkpoint, and measure how far apart they are",
)
def compare_values(
    checkpoint_id: str,
    body: CompareValues,
    context: Context,
    caller: Operator,
    idempotency_key: IdempotencyKey = None,
) -> OperationView:
    return start_comparison(context, caller, checkpoint_id, body, key=idempotency_key)
