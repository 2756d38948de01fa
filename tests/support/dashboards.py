"""Reading the views for dashboards as a test wants them: rows by column, times with their zone."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from holdfast_service.dashboards.definition import Kind
from holdfast_service.dashboards.views import all_views
from holdfast_service.samples.take import take_samples
from tests.support.service import RunningService

VIEWS = {view.subject: view for view in all_views()}
KINDS = {(view.subject, column.name): column.kind for view in VIEWS.values() for column in view.columns}


def sample_now(service: RunningService) -> None:
    """As if this hour were over; and the one before, if it has just begun."""
    now = datetime.now(UTC)
    for moment in (now - timedelta(minutes=10), now):
        take_samples(service.context, moment.replace(minute=0, second=0, microsecond=0))


def read_view(session: Session | Connection, subject: str, where: str = "true", **values: Any) -> list[dict[str, Any]]:
    """All columns of the rows, as Python values; on SQLite made from what it writes for their kinds."""
    rows = session.execute(text(f"SELECT * FROM {VIEWS[subject].name} WHERE {where}"), values).mappings()
    return [{name: _value(KINDS[subject, name], value) for name, value in row.items()} for row in rows]


def _value(kind: Kind, value: Any) -> Any:
    if value is None or not isinstance(value, str | int):
        return value
    if kind is Kind.BOOLEAN:
        return bool(value)
    if kind is Kind.NUMBER:
        return float(value)
    if isinstance(value, int):
        return value
    if kind is Kind.MOMENT:
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    if kind is Kind.DAY:
        return date.fromisoformat(value)
    return json.loads(value) if kind is Kind.DOCUMENT else value
