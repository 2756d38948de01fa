"""Opens the attempt of a launch: compare-and-swap on the newest attempt (protocol rule 2). Rank 0 does it.

A later launch wins over an earlier one. A late retry of an earlier launch must not fence its successor: if our own
opening may have been carried out and another attempt is newer now, then that one is our successor, and we stop.
"""

from __future__ import annotations

import logging

from holdfast_client.client import Client
from holdfast_client.errors import AttemptConflict, NotFound, StaleAttempt
from holdfast_protocol.attempts import AttemptOpened, OpenAttempt
from holdfast_protocol.selectors import RunName

log = logging.getLogger("holdfast.client")

TRIES = 5


def open_attempt(
    client: Client,
    run_name: RunName,
    launch_id: str,
    *,
    world_size: int,
    host: str = "",
    environment: dict[str, str] | None = None,
    create: bool | None = None,
) -> AttemptOpened:
    """Opens an attempt after the newest one. Raises StaleAttempt if a later launch has taken over in between,
    RunNotFound or ProjectNotFound if they may not be made (see OpenAttempt.create)."""
    after = _newest_attempt(client, run_name)
    for tries_left in reversed(range(TRIES)):
        request = OpenAttempt(
            launch_id=launch_id,
            after=after,
            world_size=world_size,
            host=host,
            environment=environment or {},
            create=create,
        )
        try:
            return client.open_attempt(run_name.project, run_name.run, request)
        except AttemptConflict as conflict:
            if conflict.earlier_try_ambiguous:
                raise StaleAttempt(
                    f"Launch {launch_id} of {run_name} lost the reply to its opening, and a later attempt is open now",
                    request_id=conflict.request_id,
                    context=conflict.context,
                ) from conflict
            if not tries_left:
                raise
            after = _newest_attempt(client, run_name)
            log.info("another attempt of %s was opened in between; opening after %d", run_name, after)
    raise AssertionError("the last try returns or raises")


def _newest_attempt(client: Client, run_name: RunName) -> int:
    """0 where there is none yet. The list of attempts is open to a token that may only train."""
    try:
        newest_first = client.attempts(run_name.project, run_name.run, limit=1).items
    except NotFound:
        return 0
    return newest_first[0].number if newest_first else 0
