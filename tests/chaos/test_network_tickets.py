"""Tickets that end in the middle of a save or a restore: before their turn, on their way, while the bytes go through.

SeaweedFS itself looks at the expiry of its URLs. Nobody is told, and nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.chaos.network import BOUND_SECONDS, Network, bits, network, new_state
from tests.support.fault_proxy import Delay, Fault, FaultProxy, Throttle
from tests.support.seaweedfs import SeaweedFS

TICKET_SECONDS = 5
"""Enough for the calls of a busy machine: a chunk whose tickets end again and again is given up."""

LATE = Delay(TICKET_SECONDS + 1.5)
"""S3's times are whole seconds."""

SLOW = Throttle(3_000)
"""A chunk of 4 KiB takes 1.4 s; some 24 of them, four at once, take longer than a ticket lives."""

SLOWER = Throttle(4096 / (TICKET_SECONDS + 1.5))
"""A single chunk takes longer than its ticket lives."""


@pytest.fixture(scope="module")
def net(seaweedfs: SeaweedFS) -> Iterator[Network]:
    with network(seaweedfs, ticket_seconds=TICKET_SECONDS) as running:
        yield running


@pytest.fixture(autouse=True)
def _healed(net: Network) -> Iterator[None]:
    yield
    net.heal()


def refused(store: FaultProxy, call: str) -> int:
    return sum(call in seen.calls and seen.status == 403 for seen in store.seen)


def trouble(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the job has told its user beyond the ordinary."""
    ours = [record for record in caplog.records if record.name in ("holdfast", "holdfast.client")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.rule("database-clock")
@pytest.mark.parametrize(
    ("fault", "times"),
    [(LATE, 6), (SLOW, None), (SLOWER, 3)],
    ids=["late on their way", "late for their turn", "ended in mid transfer"],
)
def test_tickets_that_end_in_mid_save_are_renewed_and_nobody_is_told(
    net: Network, caplog: pytest.LogCaptureFixture, fault: Fault, times: int | None
) -> None:
    run, state = net.new_run(), new_state(seed=1000 + (times or 0))
    with caplog.at_level(logging.INFO, logger="holdfast"), net.checkpointer(run, strict=True) as ckpt:
        ckpt.restore(state)
        net.to_store.script(fault, on="put", times=times)
        ckpt.save(0, state).committed.result(timeout=BOUND_SECONDS)
    if fault is LATE:
        assert refused(net.to_store, "put")
    assert trouble(caplog) == []
    net.assert_restores(run, bits(state), 0)


@pytest.mark.rule("database-clock")
@pytest.mark.parametrize(
    ("fault", "times"),
    [(LATE, 6), (SLOW, None), (SLOWER, 3)],
    ids=["late on their way", "late for their turn", "ended in mid transfer"],
)
def test_tickets_that_end_in_mid_restore_are_renewed_and_nobody_is_told(
    net: Network, caplog: pytest.LogCaptureFixture, fault: Fault, times: int | None
) -> None:
    run, state = net.new_run(), new_state(seed=2000)
    with net.checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(0, state).committed.result(timeout=BOUND_SECONDS)
    restored = new_state(seed=99)
    net.to_store.script(fault, on="get", skip=2, times=times)  # after the documents, which come one by one
    with caplog.at_level(logging.INFO, logger="holdfast"), net.checkpointer(run) as ckpt:
        assert ckpt.restore(restored) == 1
    if fault is LATE:
        assert refused(net.to_store, "get")
    assert trouble(caplog) == []
    assert bits(restored) == bits(state)
    assert net.to_service.count("report_chunk") == 0
