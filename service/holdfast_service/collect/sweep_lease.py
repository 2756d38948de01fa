"""One sweep of a store at a time: a second one would list it for nothing. It is no guard of what is deleted; two that
overlap after a hang delete the same objects."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from types import TracebackType
from typing import Any

from sqlalchemy import or_, update
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.custody_tables import StoreCare
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

_UNSYNCHRONIZED = {"synchronize_session": False}


class SweepLease:
    """A context manager. Entering raises `busy`; `renew` does as well once another process has it."""

    def __init__(self, context: ServiceContext, attached: AttachedStore) -> None:
        self._context = context
        self._attached = attached
        self._token = uuid.uuid4().hex
        self._seconds = context.settings.lease_seconds
        self._renewed_at = float("-inf")

    def __enter__(self) -> SweepLease:
        with self._context.database.transaction() as session:
            insert_absent(session, StoreCare, [{"store_id": self._attached.store_id}])
            free = or_(StoreCare.sweep_leased_until.is_(None), StoreCare.sweep_leased_until < database_now(session))
            self._hold(session, free)
        return self

    def renew(self) -> None:
        """Between two steps; it writes only now and then."""
        if time.monotonic() - self._renewed_at < self._seconds / 4:
            return
        with self._context.database.transaction() as session:
            self._hold(session, StoreCare.sweep_token == self._token)

    def settle(self, session: Session, sweep: dict[str, Any]) -> None:
        session.execute(
            update(StoreCare)
            .where(StoreCare.store_id == self._attached.store_id)
            .values(swept_at=database_now(session), sweep=sweep),
            execution_options=_UNSYNCHRONIZED,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._context.database.transaction() as session:
            session.execute(
                update(StoreCare)
                .where(StoreCare.store_id == self._attached.store_id, StoreCare.sweep_token == self._token)
                .values(sweep_token=None, sweep_leased_until=None),
                execution_options=_UNSYNCHRONIZED,
            )

    def _hold(self, session: Session, condition: Any) -> None:
        held = session.scalar(
            update(StoreCare)
            .where(StoreCare.store_id == self._attached.store_id, condition)
            .values(
                sweep_token=self._token, sweep_leased_until=database_now(session) + timedelta(seconds=self._seconds)
            )
            .returning(StoreCare.store_id),
            execution_options=_UNSYNCHRONIZED,
        )
        if held is None:
            raise ProblemError(
                ProblemCode.BUSY,
                f"The {self._attached.role.value} store is being swept by another process. Wait until it is done.",
            )
        self._renewed_at = time.monotonic()
