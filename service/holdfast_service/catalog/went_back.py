"""Whether the database went back to an older state under a service that runs (protocol rule 36).

Each process asks its own memory (`memory.py`), and what other processes have left beside the data (`kept_memory.py`).
What one of them finds stands in the catalog's identity, so that all of them refuse: writes of training jobs, the choice
of a restore point, and deletions. It stays until an operator has compared the catalog with its stores and accepted what
is lost (`epoch.py`). People can read meanwhile.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, literal, select
from sqlalchemy.orm import Session

from holdfast_service.catalog.memory import INFO, Memory, Snapshot
from holdfast_service.catalog.tables import CatalogIdentity
from holdfast_service.database import Database
from holdfast_service.errors import WentBackError


def refuse_if_went_back(session: Session) -> None:
    """In a transaction that writes for a training job. Raises WentBackError."""
    memory: Memory = session.info[INFO]
    known = memory.snapshot()
    server = _read(session)
    if server != memory.proven_on:
        _prove(session, memory, known, server)


def prove_history(database: Database) -> str:
    """Outside of any transaction, before something is chosen or deleted: the server that has all that this process
    remembers. Raises WentBackError."""
    known = database.memory.snapshot()  # before the session sees anything
    with database.read() as session:
        server = _read(session)
        _prove(session, database.memory, known, server)
    return server


def _read(session: Session) -> str:
    """Which server answers. Raises WentBackError if a process has found that the database went back."""
    found, server = session.execute(select(CatalogIdentity.went_back, _server(session))).one()
    if found is not None:
        raise WentBackError(found, noticed=True)
    return str(server)


def _prove(session: Session, memory: Memory, known: Snapshot, server: str) -> None:
    lost = known.lost(session)
    if lost is not None:
        raise WentBackError(lost)
    memory.proven_on = server


def _server(session: Session) -> ColumnElement[str]:
    """Another one after each failover, and after each restart of the same."""
    if session.get_bind().dialect.name == "postgresql":
        return func.concat(func.pg_postmaster_start_time(), "")
    return literal("sqlite")
