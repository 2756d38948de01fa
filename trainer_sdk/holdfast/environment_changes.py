"""Tells on resume what is another now than it was for the attempt that wrote the restore point: restored -> the log.

Another torch or GPU type may round otherwise, another commit may compute something else. Nothing is refused for it: to
go on elsewhere is what checkpoints are for. It is only never hidden.
"""

from __future__ import annotations

import logging

from holdfast.environment import differences
from holdfast.errors import HoldfastError
from holdfast.session import Session

log = logging.getLogger("holdfast")


def tell_differences(session: Session, written_by: int) -> None:
    """For rank 0. `written_by`: the attempt whose checkpoint was restored. Never raises."""
    if written_by == session.opened.attempt:
        return
    try:
        wrote = session.brief_client.attempt(session.run.project, session.run.run, written_by)
    except HoldfastError as error:
        log.info("what attempt %d ran with is not known, so nothing is compared: %s", written_by, error)
        return
    for difference in differences(wrote.environment, session.environment):
        log.warning("since attempt %d, which saved this, %s", written_by, difference)
