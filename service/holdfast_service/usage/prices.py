"""The price list: the newest one that an administrator has put, else the defaults with their date and source."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.usage import DEFAULT_PRICES, PriceList, PriceListView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import PriceList as PriceRow
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


def show_prices(context: ServiceContext) -> PriceListView:
    with context.database.read() as session:
        return current_prices(session)


def put_prices(context: ServiceContext, caller: Principal, wanted: PriceList) -> PriceListView:
    """The same again is fine. Raises `forbidden` for a project's token: the list is everybody's."""
    caller.check_every_project()
    with context.database.transaction() as session:
        before = current_prices(session)
        if before.prices == wanted:
            return before
        now = database_now(session)
        session.add(PriceRow(document=wanted.model_dump(mode="json"), updated_at=now, updated_by=caller.name))
        record_event(
            session,
            Actor.person(caller),
            "prices.put",
            before=before.prices.model_dump(mode="json"),
            after=wanted.model_dump(mode="json"),
        )
        session.flush()
        return current_prices(session)


def current_prices(session: Session) -> PriceListView:
    row = session.scalar(select(PriceRow).order_by(PriceRow.id.desc()).limit(1))
    if row is None:
        return PriceListView(prices=DEFAULT_PRICES, is_default=True, updated_at=None, updated_by=None)
    return PriceListView(
        prices=PriceList.model_validate(row.document),
        is_default=False,
        updated_at=row.updated_at,
        updated_by=row.updated_by,
    )
