"""Networks that stay bad, for longer than any retry deadline or at random: a commit or a clean end, never a wrong bit.

A failed save is aborted, or nobody lists it; the next one goes well. A failed restore has touched nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import errors
from holdfast_client.transport import Backoff
from tests.chaos.network import BOUND_SECONDS, Network, all_bits, big_tensor, bits, network, new_state
from tests.support.fault_proxy import (
    BAD_GATEWAY,
    INTERNAL_ERROR,
    SLOW_DOWN,
    BlackHole,
    CutBefore,
    CutReply,
    CutRequest,
    Delay,
    DropReply,
    Fault,
    Garble,
    Throttle,
)
from tests.support.seaweedfs import SeaweedFS

STORM: tuple[Fault, ...] = (
    *(Delay(0.05), CutBefore(), CutRequest(), CutRequest(0.9), DropReply(), CutReply(), CutReply(0.0)),
    *(SLOW_DOWN, INTERNAL_ERROR, BAD_GATEWAY, Throttle(50_000), BlackHole(0.3)),
)
STORM_SECONDS = 3.0

LASTING: dict[str, Fault] = {"drop reply": DropReply(), "slow down": SLOW_DOWN}
SAVES = ("begin", "negotiate", "put", "finished", "seal")
RESTORES = ("newest_attempt", "open", "manifest", "read_tickets", "get", "resumed_from")

_seeds = itertools.count(500)


@pytest.fixture(scope="module")
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    seaweedfs: SeaweedFS | None = request.getfixturevalue("seaweedfs") if request.param == "s3" else None
    with network(seaweedfs) as running:
        yield running


@pytest.fixture(autouse=True)
def _healed(net: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("holdfast.session.session._BRIEF_SECONDS", 0.5)
    yield
    net.heal()


@pytest.fixture
def _a_first_try_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a restore's calls counts from their start, and a busy machine's first try could use it up."""
    begin = Backoff.__init__
    monkeypatch.setattr(
        Backoff, "__init__", lambda self, seconds, sleep, **_: begin(self, seconds, sleep, from_failure=True)
    )


def for_ever(net: Network, fault: Fault, call: str) -> None:
    (net.to_store if call in ("put", "get") else net.to_service).script(fault, on=call, times=None)


@pytest.mark.parametrize(
    ("net", "fault", "call"),
    [("s3", fault, call) for fault in ("drop reply", "slow down") for call in SAVES]
    + [("posix", "drop reply", call) for call in SAVES],
    indirect=["net"],
)
def test_a_save_that_cannot_get_through_fails_and_the_next_one_goes_well(net: Network, fault: str, call: str) -> None:
    run, state = net.new_run(), new_state(seed=next(_seeds))
    with net.checkpointer(run, save_retry_seconds=0.5) as ckpt:
        ckpt.restore(state)
        before = all_bits(state)
        for_ever(net, LASTING[fault], call)
        handle = ckpt.save(0, state)
        failed = handle.committed.exception(timeout=BOUND_SECONDS)
        assert net.struck() > 1, "it was tried again"
        assert all_bits(state) == before
        # The service may have carried out what nobody ever heard of: then it is there, and whole.
        committed = [view for view in net.checkpoints(run) if view.state == "committed"]
        assert isinstance(failed, errors.SaveFailed)
        assert not committed or (call == "seal" and fault == "drop reply")
        point = net.client.restores.restore_point(*run.split("/")).restore_point
        assert (point is not None) == bool(committed)
        net.heal()
        if not committed:
            ckpt.save(1, state).committed.result(timeout=BOUND_SECONDS)
    if committed:
        net.assert_restores(run, before[0], 0)
        return
    net.assert_restores(run, before[0], 1)
    states = {view.step: view.state for view in net.checkpoints(run)}
    assert states.pop(1) == "committed"
    assert states in ({}, {0: "aborted"}), "what never came to a begin is not there; all else the next launch has ended"


@pytest.mark.usefixtures("_a_first_try_takes_its_time")
@pytest.mark.parametrize(
    ("net", "call"), [*(("s3", call) for call in RESTORES), ("posix", "get"), ("posix", "open")], indirect=["net"]
)
def test_a_restore_that_cannot_get_through_raises_and_touches_nothing(
    net: Network, saved: tuple[str, dict[str, Any]], call: str
) -> None:
    run, expected = saved
    state = new_state(seed=77)
    before = all_bits(state)
    for_ever(net, DropReply(), call)
    with net.checkpointer(run, retry_seconds=1.0) as ckpt:
        with pytest.raises(errors.HoldfastError):
            ckpt.restore(state)
        if call != "resumed_from":  # which comes when every bit is there
            assert all_bits(state) == before
    assert net.struck() > 1, "it was tried again"
    net.assert_restores(run, expected, 3)


@pytest.fixture(scope="module")
def saved(net: Network) -> tuple[str, dict[str, Any]]:
    """A run with a checkpoint at step 3, and what is in it."""
    run, state = net.new_run(), new_state(seed=3)
    with net.checkpointer(run) as ckpt:
        ckpt.restore(state)
        ckpt.save(3, state).committed.result(timeout=BOUND_SECONDS)
    return run, bits(state)


@pytest.mark.parametrize(("net", "seed"), [("s3", 1), ("posix", 2)], indirect=["net"])
def test_in_a_storm_every_commit_is_true_and_every_failure_clean(net: Network, seed: int) -> None:
    run, state = net.new_run(), new_state(seed=seed)
    outcomes: dict[int, dict[str, Any] | None] = {}
    with net.checkpointer(run, save_retry_seconds=3.0, timeout_seconds=2.0) as ckpt:
        ckpt.restore(state)
        for proxy in {id(proxy): proxy for proxy in (net.to_service, net.to_store)}.values():
            proxy.storm(seed, 0.3, STORM)
        ends = time.monotonic() + STORM_SECONDS
        # On a busy machine few saves fit into that time, and none of them may get through.
        while time.monotonic() < ends or not any(outcomes.values()):
            step = len(outcomes)
            state["big"]["t"].copy_(big_tensor(10_000 * seed + step))
            before = all_bits(state)
            failed = ckpt.save(step, state).committed.exception(timeout=BOUND_SECONDS)
            assert failed is None or isinstance(failed, errors.SaveFailed)
            assert all_bits(state) == before
            outcomes[step] = before[0] if failed is None else None
        assert net.struck()
    committed = {view.step for view in net.checkpoints(run) if view.state == "committed"}
    assert committed >= {step for step, content in outcomes.items() if content is not None}
    newest = max(step for step, content in outcomes.items() if content is not None)
    if newest == max(committed):
        restore_in_a_storm(net, run, seed, outcomes[newest], newest)
    for step in sorted(committed, reverse=True)[:3]:
        if outcomes[step] is not None:
            net.assert_restores(run, outcomes[step], step, at=str(step))


def restore_in_a_storm(net: Network, run: str, seed: int, expected: dict[str, Any], step: int) -> None:
    net.to_store.storm(seed, 0.2, [*STORM, Garble()])
    state = new_state(seed=99)
    before = bits(state)
    try:
        with net.checkpointer(run, retry_seconds=3.0, timeout_seconds=2.0) as ckpt:
            assert ckpt.restore(state) == step + 1
    except errors.HoldfastError:
        assert bits(state) == before
    else:
        assert bits(state) == expected
    net.heal()
