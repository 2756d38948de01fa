"""A ticket that died while it waited is no refusal: neither of them uses up the other's tries."""

from __future__ import annotations

import pytest

from holdfast_client.chunks import connections as ticket_life
from holdfast_client.chunks.connections import USED_PART, TicketLife, TicketWaitedTooLong
from holdfast_client.errors import StoreUnavailable, TicketExpired
from tests.support.transfers import Service, fetch, some_chunks, upload


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(ticket_life.time, "monotonic", lambda: now[0])
    return now


def use(life: TicketLife, clock, seconds: float, error: Exception | None = None) -> None:
    with life.used():
        clock[0] += seconds
        if error is not None:
            raise error


def test_a_transfer_that_would_begin_too_late_does_not_begin(clock):
    life = TicketLife(10)
    clock[0] += 10 * USED_PART
    with pytest.raises(TicketWaitedTooLong):
        use(life, clock, 0)


def test_a_transfer_that_began_in_time_may_end_later(clock):
    use(TicketLife(10), clock, 100)


def test_a_refusal_is_the_clocks_fault_if_the_time_is_over(clock):
    with pytest.raises(TicketWaitedTooLong):
        use(TicketLife(10), clock, 100, TicketExpired("it has expired"))
    with pytest.raises(TicketExpired) as caught:
        use(TicketLife(10), clock, 1, TicketExpired("it is not accepted"))
    assert not isinstance(caught.value, TicketWaitedTooLong)
    with pytest.raises(StoreUnavailable):
        use(TicketLife(10), clock, 100, StoreUnavailable("it is unavailable"))


@pytest.mark.parametrize("direction", ["up", "down"])
def test_many_tickets_that_died_and_a_few_that_were_refused_still_end_well(direction):
    service = Service()
    try:
        [chunk] = some_chunks(count=1).items()
        if direction == "down":
            service.objects.update([chunk])
        service.faults = {"dead ticket": 7, "refused ticket": 3}
        if direction == "up":
            assert upload(service, dict([chunk])).sent_chunks == 1
        else:
            assert fetch(service, [chunk[0]]) == dict([chunk])
        assert service.faults == {"dead ticket": 0, "refused ticket": 0}
    finally:
        service.close()
