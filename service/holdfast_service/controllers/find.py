"""From a name to a controller, and to its row, which is made where no round has made it yet."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.background import rounds_of
from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.rounds import Round
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def find_round(context: ServiceContext, name: str) -> Round:
    """Raises `controller_not_found`."""
    rounds = {each.name: each for each in rounds_of(context.settings)}
    if name not in rounds:
        raise ProblemError(
            ProblemCode.CONTROLLER_NOT_FOUND,
            f"There is no controller {name[:50]!r}. Take one of these: {', '.join(sorted(rounds))}.",
        )
    return rounds[name]


def locked_row(session: Session, name: str) -> Controller:
    insert_absent(session, Controller, [{"name": name, "ticked_at": database_now(session)}])
    return session.execute(select(Controller).where(Controller.name == name).with_for_update()).scalar_one()
