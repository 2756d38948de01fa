"""After a new epoch no copy is trusted before it was looked at, however cold it is (rule fencing-token): what can be
read is read, and of what lies in an archive the store is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast_protocol.states import StoreRole
from holdfast_service.attached_stores.epoch import raise_epoch
from holdfast_service.audit.record import Actor
from holdfast_service.lineage.best_and_proven import proven_among
from holdfast_service.scrub import verify
from tests.service.conftest import Clock
from tests.support.rank import digest_of
from tests.support.rebuilt import check_all, claim_all
from tests.support.rot import attached, flip
from tests.support.service import running_service
from tests.support.tiers import DAY, HOUR, IN_A_BUCKET, IN_A_FOLDER, Cold, weights


@contextmanager
def new_epoch(cold: Cold, clock: Clock) -> Iterator[Cold]:
    """The catalog after a restore, and the service that was started on it."""
    raise_epoch(cold.context.database, Actor.at_the_database())
    with running_service(cold.context.settings) as service:
        yield Cold(service, clock.advance, cold.fake)


def lose(cold: Cold, step: int) -> None:
    """What the backup of the catalog does not know yet: the object is gone."""
    assert cold.fake is not None
    everything = cold.fake.objects._stored
    for name in [name for name in everything if digest_of(weights(step)) in name]:
        del everything[name]


def is_proven(cold: Cold, step: int) -> bool:
    checkpoint_id = cold.view(step)["id"]
    with cold.context.database.read() as session:
        return checkpoint_id in proven_among(session, [checkpoint_id])


@IN_A_FOLDER
@pytest.mark.rule("fencing-token")
def test_what_lies_in_a_cold_store_is_read_again(cold: Cold, clock: Clock) -> None:
    cold.cooled(4)
    cold.collect()
    flip(attached(cold.service, StoreRole.COLD).store, cold.keys(weights(1))[-1])
    with new_epoch(cold, clock) as later:
        assert not is_proven(later, 1)
        report = verify.reconcile(later.context)
        assert (report.failed, report.bad, report.corrupt_checkpoints) == (0, 1, (later.view(1)["id"],))
        assert later.copies(weights(2)) == [("cold", "cold")]
        assert (later.tier(2), later.view(2)["health"], is_proven(later, 2)) == ("cold", "ok", True)


@IN_A_BUCKET
@pytest.mark.rule("fencing-token")
def test_of_what_lies_in_an_archive_the_store_is_asked(cold: Cold, clock: Clock) -> None:
    cold.cooled(4)
    cold.collect()
    lose(cold, 1)
    needs = cold.thaw_status(2)
    with new_epoch(cold, clock) as later:
        assert not is_proven(later, 1)
        assert later.thaw_status(2) == needs, "what was not looked at yet is no more readable than before"
        report = verify.reconcile(later.context)
        assert (report.failed, report.bad, report.corrupt_checkpoints) == (0, 1, (later.view(1)["id"],))
        assert later.copies(weights(2)) == [("cold", "archive")]
        assert (later.tier(2), later.view(2)["health"], is_proven(later, 2)) == ("cold", "ok", True)


@IN_A_FOLDER
@pytest.mark.rule("fencing-token")
def test_a_thaw_from_a_cold_store_copies_back_what_was_read_and_makes_nothing_hot_before(
    cold: Cold, clock: Clock
) -> None:
    cold.cooled()
    cold.collect()
    cold.thaw(1, days=2)
    with new_epoch(cold, clock) as later:
        later.round()
        assert (later.tier(1), later.thaw_status(1)["readable_chunks"]) == ("thawing", 0)
        assert verify.reconcile(later.context).failed == 0
        check_all(later.context)
        claim_all(later.context)
        later.until_idle()
        assert (later.tier(1), later.content(1, weights(1))) == ("hot", weights(1))


@IN_A_BUCKET
@pytest.mark.rule("fencing-token")
def test_a_thaw_goes_on_in_the_new_epoch(cold: Cold, clock: Clock) -> None:
    cold.cooled()
    cold.collect()
    cold.thaw(1, days=2)
    cold.round()
    assert cold.copies(weights(1)) == [("thawing", "archive")]
    with new_epoch(cold, clock) as later:
        assert later.copies(weights(1)) == [("suspect", "archive")]
        assert verify.reconcile(later.context).failed == 0
        check_all(later.context)
        claim_all(later.context)
        assert later.thaw_status(1)["state"] == "thawing"
        later.advance(13 * HOUR)
        later.until_idle()
        assert later.content(1, weights(1)) == weights(1)
        later.advance(4 * DAY)
        later.until_idle()
        assert later.tier(1) == "cold"
