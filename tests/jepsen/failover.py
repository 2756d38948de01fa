"""The database goes back to an older state beneath running services; and what an operator does, as
docs/operating/disaster.md says. Before the failover jobs are launched anew, so that the older state does not know their
attempts; after it others are, beside them: with the same number, if nothing tells the two apart."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from sqlalchemy import select

from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.records.documents import FOLDER, RecordKind
from holdfast_service.records.scanning import scan_records
from holdfast_service.stores.registry import open_store
from tests.jepsen.database import Copy
from tests.jepsen.journal import Journal, Wrong
from tests.jepsen.place import Place

_LAUNCH_SECONDS = 60
_BEHIND_SECONDS = (0.0, 4.0)
"""So much more is lost."""
_TOLD_SECONDS = 60.0
"""A service that has lost its connections has noticed by then."""
_SHARE_FAILED_BACK = 0.3
_SHARE_UNRECORDED = 0.5
_NAMED = 20
"""Examples of each kind of finding."""
_WENT_BACK = "went back"


def copied_over(place: Place, journal: Journal, numbers: random.Random) -> str:
    return _fail_over(place, journal, numbers, place.postgres.older_copy)


def promoted(place: Place, journal: Journal, numbers: random.Random) -> str:
    return _fail_over(place, journal, numbers, place.postgres.standby)


def _fail_over(place: Place, journal: Journal, numbers: random.Random, take: Callable[[], Copy]) -> str:
    if numbers.random() < _SHARE_UNRECORDED:
        # As on a busy machine: the copy knows commits that have no record yet.
        place.client.controllers.pause("records", "the outbox is behind")
        _wait_for_commits(journal, {runner.name for runner in place.runners}, of_new_launches=False)
    copy = take()
    place.postgres.cut_off(copy)
    launched_anew = numbers.sample(place.runners, k=len(place.runners) // 2)
    for runner in launched_anew:
        runner.kill9()
    _wait_for_commits(journal, {runner.name for runner in launched_anew})
    time.sleep(numbers.uniform(*_BEHIND_SECONDS))
    place.postgres.fail_over(copy)
    at = time.monotonic()
    beside_the_data = recorded(place)
    behind = at - copy.knows_until
    for runner in place.runners:
        runner.launch_beside()
    told = _wait_for_word(place)
    if told is not None and numbers.random() < _SHARE_FAILED_BACK:
        place.postgres.fail_back()
        place.client.controllers.resume("records")
        return f"{behind:.1f} s behind; failed back to the one before, which has lost nothing"
    journal.failed_over(copy.knows_until, at, beside_the_data)
    if told is None:
        place.client.controllers.resume("records")
        return f"{behind:.1f} s behind, and nobody said so"
    journal.told(told)
    return f"{behind:.1f} s behind; {bring_back(place, journal)}"


def _wait_for_commits(journal: Journal, runs: set[str], *, of_new_launches: bool = True) -> None:
    """Until each of the runs has committed anew: in launches that the copy does not know, or in any."""
    since = time.monotonic()
    while time.monotonic() < since + _LAUNCH_SECONDS:
        new = {line["launch"] for line in journal.lines("opened") if line["at"] > since}
        committed = [line for line in journal.lines("committed") if line["at"] > since]
        if runs <= {line["run"] for line in committed if line["launch"] in new or not of_new_launches}:
            return
        time.sleep(0.2)


def recorded(place: Place) -> list[str]:
    """The checkpoints that have a record in the first store now."""
    settings = place.service_settings()
    store = open_store(settings.store or "", bytes(32))
    try:
        found = scan_records(store, FOLDER).by_subject.values()
        return [
            each.subject.subject_id
            for each in found
            if each.subject.kind is RecordKind.CHECKPOINT and each.newest is not None and not each.removed
        ]
    finally:
        store.close()


def _wait_for_word(place: Place) -> str | None:
    deadline = time.monotonic() + _TOLD_SECONDS
    while time.monotonic() < deadline:
        for said in place.readiness():
            if _WENT_BACK in said:
                return said
        time.sleep(0.2)
    return None


def bring_back(place: Place, journal: Journal) -> str:
    """A new epoch, and what the check says; then the catalog from the bucket, in an empty database, with what only the
    database that went back knows."""
    place.stop_members()
    _must(place, "admin", "raise-epoch")
    place.start_members()
    missing = _missing(place)
    said = place.holdfast("catalog", "check", "--json").stdout
    unnamed = [each for each in missing if each not in said]
    if unnamed and len(missing) <= _NAMED:
        journal.found(Wrong.LOST, f"after a failover `holdfast catalog check` does not name {', '.join(unnamed)}")
    place.stop_members()
    replaced = place.settings["HOLDFAST_DATABASE_URL"]
    place.new_database()
    _must(place, "catalog", "rebuild", "--from", place.settings["HOLDFAST_STORE"], "--with-database", replaced)
    place.start_members()
    place.holdfast("catalog", "check")
    # A record that was begun and not ended cannot be rebuilt. The judge knows which commits that may concern.
    _must(place, "stores", "claim", "--accept-loss")
    return f"{len(missing)} commits missing, {len(missing) - len(unnamed)} named; rebuilt"


def _missing(place: Place) -> list[str]:
    """The recorded checkpoints that the database does not know."""
    database = Database(place.settings["HOLDFAST_DATABASE_URL"])
    try:
        with database.read() as session:
            known = set(session.scalars(select(Checkpoint.id)))
    finally:
        database.dispose()
    return [each for each in recorded(place) if each not in known]


def _must(place: Place, *command: str) -> None:
    done = place.holdfast(*command)
    if done.returncode:
        raise RuntimeError(f"holdfast {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
