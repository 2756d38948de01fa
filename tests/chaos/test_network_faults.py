"""Each kind of fault at each kind of call, of a save and of a restore: it passes, and every bit is right.

What lasts longer than any retry deadline is in test_network_failures.py. The jobs go on from test to test, as a job
goes on after a fault.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast
from holdfast_client.client import Client
from tests.chaos.network import BOUND_SECONDS, Network, all_bits, big_tensor, bits, network, new_state
from tests.support.fault_proxy import (
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Answer,
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

FAULTS: dict[str, Fault] = {
    "delay": Delay(0.1),
    "cut before": CutBefore(),
    "cut request": CutRequest(),
    "drop reply": DropReply(),
    "cut reply": CutReply(),
    "throttle": Throttle(40_000),
    "500": INTERNAL_ERROR,
    "slow down": SLOW_DOWN,
    "429": Answer(429, b"", {"Retry-After": "0"}),
    "black hole": BlackHole(),
}
OF_A_LAUNCH = ("newest_attempt", "open")
OF_A_SAVE = ("begin", "negotiate", "put", "finished", "seal")
OF_A_RESTORE = (*("restore_point", "manifest", "read_tickets", "get", "report_chunk", "resumed_from", "release"),)
TO_THE_STORE = ("put", "get")

every_fault = pytest.mark.parametrize("fault", FAULTS)
_seeds = itertools.count(1)


@dataclass
class RunningJob:
    """A job in the middle of its run: its last step, and the bits that it saved there."""

    ckpt: holdfast.Checkpointer
    run: str
    state: dict[str, Any]
    step: int = -1
    saved: dict[str, Any] | None = None

    def save(self) -> None:
        """One more step, with a state of which no chunk was ever seen."""
        self.step += 1
        self.state["big"]["t"].copy_(big_tensor(next(_seeds)))
        before = all_bits(self.state)
        assert self.ckpt.save(self.step, self.state).committed.result(timeout=BOUND_SECONDS).step == self.step
        assert all_bits(self.state) == before
        self.saved = before[0]

    def restore(self) -> None:
        """Its newest checkpoint, into a state that is not it."""
        other = new_state(seed=99)
        assert self.ckpt.restore(other) == self.step + 1
        assert bits(other) == self.saved


@pytest.fixture(scope="module")
def net(seaweedfs: SeaweedFS) -> Iterator[Network]:
    with network(seaweedfs) as running:
        yield running


@pytest.fixture(scope="module")
def jobs(net: Network) -> Iterator[dict[bool, RunningJob]]:
    """One for most faults, and an impatient one for those where nothing ever answers."""
    with ExitStack() as stack:
        running = {}
        for impatient in (False, True):
            run, state = net.new_run(), new_state(next(_seeds))
            ckpt = stack.enter_context(net.checkpointer(run, **_retry_deadline(impatient)))
            assert ckpt.restore(state) == 0
            running[impatient] = RunningJob(ckpt, run, state)
            running[impatient].save()
        yield running
        net.heal()


@pytest.fixture
def job(net: Network, jobs: dict[bool, RunningJob], fault: str) -> Iterator[RunningJob]:
    yield jobs[fault == "black hole"]
    net.heal()


def strike(net: Network, fault: str, call: str) -> None:
    """What there are many of is struck twice in a row."""
    times = 2 if call in TO_THE_STORE and fault != "black hole" else 1
    happens = FAULTS[fault]
    if call == "report_chunk" and fault == "black hole":
        happens = BlackHole(1.0)  # the service may take minutes to read a chunk, so nobody gives up earlier
    (net.to_store if call in TO_THE_STORE else net.to_service).script(happens, on=call, times=times)


def _retry_deadline(impatient: bool) -> dict[str, float]:
    return {"timeout_seconds": 2.0} if impatient else {}  # a busy machine must answer in it


@every_fault
@pytest.mark.parametrize("call", OF_A_SAVE)
def test_a_save_gets_through(net: Network, job: RunningJob, fault: str, call: str):
    strike(net, fault, call)
    job.save()
    assert net.struck(), f"no {call} came by"
    committed = net.checkpoints(job.run)[0]
    assert (committed.step, committed.state) == (job.step, "committed")
    net.heal()
    job.restore()


@every_fault
@pytest.mark.parametrize("call", OF_A_RESTORE)
def test_a_restore_gets_through(net: Network, job: RunningJob, fault: str, call: str):
    if call == "report_chunk":
        net.to_store.script(Garble(), on="get")
    struck_before = net.struck()
    strike(net, fault, call)
    job.restore()
    assert net.struck() > struck_before, f"no {call} came by"


@pytest.mark.parametrize("fault", ["429"])
def test_who_asks_for_a_pause_gets_it(net: Network, job: RunningJob):
    for proxy, call in ((net.to_service, "begin"), (net.to_store, "put")):
        proxy.script(TOO_MANY_REQUESTS, on=call)
    began = time.monotonic()
    job.save()
    assert time.monotonic() - began >= 2, "both ask for a second, one after the other"
    assert net.struck() == 2


@every_fault
@pytest.mark.parametrize("call", OF_A_LAUNCH)
def test_a_launch_gets_through(net: Network, job: RunningJob, fault: str, call: str):
    run, state = net.new_run(), new_state(next(_seeds))
    strike(net, fault, call)
    with net.checkpointer(run, **_retry_deadline(fault == "black hole")) as ckpt:
        assert ckpt.restore(state) == 0
        assert net.struck(), f"no {call} came by"
        ckpt.save(0, state).committed.result(timeout=BOUND_SECONDS)
    assert [attempt.number for attempt in net.client.attempts.all(*run.split("/"))] == [1]


@pytest.mark.parametrize("fault", ["black hole"])
def test_a_long_wait_that_was_swallowed_is_asked_again(net: Network, job: RunningJob) -> None:
    committed = net.checkpoints(job.run)[0]
    net.to_service.script(BlackHole(), on="wait")
    with Client(net.settings(timeout_seconds=1.0)) as client:
        assert client.checkpoints.get(committed.id, wait_seconds=1).id == committed.id


@every_fault
def test_the_end_of_a_job_gets_through(net: Network, job: RunningJob, fault: str):
    run = net.new_run()
    strike(net, fault, "end")
    with net.checkpointer(run, **_retry_deadline(fault == "black hole")) as ckpt:
        ckpt.restore({})
    assert net.struck()
    [attempt] = net.client.attempts.all(*run.split("/"))
    assert attempt.outcome == "finished"


def test_a_store_behind_the_service_gets_every_fault_in_one_save_and_one_restore() -> None:
    with network(None) as net:
        run, state = net.new_run(), new_state(next(_seeds))
        with net.checkpointer(run, **_retry_deadline(True)) as ckpt:
            ckpt.restore(state)
            for call in TO_THE_STORE:
                # Each at another request; the first that is due takes it.
                for number, fault in enumerate((*FAULTS.values(), Garble())):
                    net.to_service.script(fault, on=call, skip=number)
            ckpt.save(0, state).committed.result(timeout=BOUND_SECONDS)
            assert net.struck() == len(FAULTS) + 1
            other = new_state(seed=99)
            assert ckpt.restore(other) == 1
            assert net.struck() == 2 * (len(FAULTS) + 1)
        assert bits(other) == bits(state)


def test_heartbeats_that_are_lost_end_nothing() -> None:
    with network(None, lost_after_seconds=0.5) as net:
        run, state = net.new_run(), new_state(next(_seeds))
        with net.checkpointer(run, strict=True, **_retry_deadline(True)) as ckpt:
            ckpt.restore(state)
            for fault in FAULTS.values():
                net.to_service.script(fault, on="heartbeat")
            while len(net.to_service.struck()) < len(FAULTS):
                time.sleep(0.02)
            net.to_service.wait_for("heartbeat", net.to_service.count("heartbeat") + 1)
            ckpt.step(0, state).committed.result(timeout=BOUND_SECONDS)
        [attempt] = net.client.attempts.all(*run.split("/"))
        assert attempt.outcome == "finished"
