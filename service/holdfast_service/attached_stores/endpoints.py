"""Routes of the attached stores: sample objects and clocks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.states import Scope
from holdfast_protocol.stores import MakeSample, SampleChecked, SampleOffer, StoreClock
from holdfast_service.attached_stores import samples as sample
from holdfast_service.attached_stores.samples import store_clocks
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.web.guarded_route import GuardedRoute

# Routes of sample objects and of the stores' clocks. See holdfast_protocol.stores and holdfast_protocol.stores.

router = APIRouter(route_class=GuardedRoute, prefix="/v1", tags=["samples"])
Caller = Annotated[Principal, require(Scope.TRAIN)]


@router.post("/store-samples", status_code=201, summary="Offer a sample object, and get a ticket to upload it")
def make(body: MakeSample, context: Context, _caller: Caller) -> SampleOffer:
    return sample.make_sample(context, body)


@router.post(
    "/store-samples/{sample_id}/checks", summary="Have the store asked for a sample, and get a ticket to read it"
)
def check(sample_id: str, context: Context, _caller: Caller) -> SampleChecked:
    return sample.check_sample(context, sample_id)


@router.delete("/store-samples/{sample_id}", status_code=204, summary="Delete a sample")
def delete(sample_id: str, context: Context, _caller: Caller) -> None:
    sample.delete_sample(context, sample_id)


@router.get("/store-clocks", summary="Ask the attached stores what time it is, and compare")
def clocks(context: Context, _caller: Annotated[Principal, require(None)]) -> Page[StoreClock]:
    return Page(items=store_clocks(context))
