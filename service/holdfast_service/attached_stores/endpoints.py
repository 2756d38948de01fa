"""Routes of the attached stores: sample objects and clocks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast_protocol.base import Page
from holdfast_protocol.stores import MakeSample, SampleChecked, SampleOffer, StoreClock
from holdfast_service.attached_stores import samples as sample
from holdfast_service.attached_stores.samples import store_clocks
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, page_of
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import AnyCaller, Cursor, Limit, Trainer

SampleId = Annotated[str, Path(pattern=r"^[0-9a-f]{64}-[0-9a-f]{32}$")]

router = APIRouter(route_class=GuardedRoute, prefix="/v1", tags=["stores"])


@router.post(
    "/store-samples",
    status_code=201,
    name="create_sample",
    summary="Offer a sample object, and get a ticket to upload it",
)
def make(body: MakeSample, context: Context, caller: Trainer) -> SampleOffer:
    return sample.make_sample(context, caller, body)


@router.post(
    "/store-samples/{sample_id}/check",
    name="check_sample",
    summary="Have the store asked for a sample, and get a ticket to read it",
)
def check(sample_id: SampleId, context: Context, _caller: Trainer) -> SampleChecked:
    return sample.check_sample(context, sample_id)


@router.delete("/store-samples/{sample_id}", status_code=204, name="delete_sample", summary="Delete a sample")
def delete(sample_id: SampleId, context: Context, _caller: Trainer) -> None:
    sample.delete_sample(context, sample_id)


@router.get("/store-clocks", name="list_clocks", summary="Ask the attached stores what time it is, and compare")
def clocks(
    context: Context, _caller: AnyCaller, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[StoreClock]:
    return page_of("clocks", store_clocks(context), lambda each: each.role, cursor=cursor, limit=limit)
