"""From a name to a controller, and to its row, which is made where no round has made it yet."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.rounds import Round
from holdfast_service.clock import database_now
from holdfast_service.errors import ProblemError


def find_round(rounds: Sequence[Round], name: str) -> Round:
    """Raises `controller_not_found`."""
    found = next((each for each in rounds if each.name == name), None)
    if found is None:
        names = ", ".join(sorted(each.name for each in rounds))
        raise ProblemError(
            ProblemCode.CONTROLLER_NOT_FOUND, f"There is no controller {name[:50]!r}. Take one of these: {names}."
        )
    return found


def locked_row(session: Session, name: str) -> Controller:
    insert_absent(session, Controller, [{"name": name, "ticked_at": database_now(session)}])
    return session.execute(select(Controller).where(Controller.name == name).with_for_update()).scalar_one()
