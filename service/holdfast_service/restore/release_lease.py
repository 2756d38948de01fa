"""Ends a read lease before its time. Its absence is fine: it may have run out."""

from __future__ import annotations

from sqlalchemy import delete

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.tables import ReadLease
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def release_lease(context: ServiceContext, caller: Principal, lease_id: str) -> None:
    """Only the caller's own; another's stays, and nothing tells whether there is one."""
    try:
        with context.database.transaction() as session:
            session.execute(delete(ReadLease).where(ReadLease.id == lease_id, ReadLease.token_id == caller.token_id))
    except ProblemError as error:
        # None could be taken either; one from before runs out.
        if error.code is not ProblemCode.CATALOG_READ_ONLY:
            raise
