"""The ranks of a host begin and seal in one call; a rank that is late, dead, hung or refused costs only itself."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from holdfast_client import host_calls
from holdfast_client.errors import CheckpointAborted, RouteNotFound, ServiceUnavailable, StaleAttempt, TransferStopped
from holdfast_client.host_calls import HostCalls
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    CheckpointBegun,
    ChunkAnswer,
    ChunkOffer,
    FirstOffer,
    IndexOrdinals,
    RankNegotiated,
    SealShard,
)
from holdfast_protocol.digests import shard_digest

SECRET = secrets.token_hex(32)
"""Of this test process alone; its children are told."""
LONG = 60.0
SPAWN = multiprocessing.get_context("spawn")


class FakeService:
    """Takes every call, and answers once `go_on` is set. `calls` holds who made it, what it is, and the ranks in it."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, str, list[int]]] = []
        self.called = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.refused: dict[int, Exception] = {}
        """By rank: the error of each call that this rank is in."""
        self.negotiates = True
        self.knows_joint_seals = True

    def client(self, who: object) -> FakeClient:
        return FakeClient(self, who)

    def take(self, who: object, what: str, ranks: list[int]) -> None:
        self.calls.append((who, what, sorted(ranks)))
        self.called.set()
        if who == "joint":
            assert self.go_on.wait(LONG)
        for rank in ranks:
            if rank in self.refused:
                raise self.refused[rank]


class FakeClient:
    def __init__(self, service: FakeService, who: object) -> None:
        self.checkpoints = self
        self._service = service
        self._who = who
        self.settings = ClientSettings(retry_seconds=7.0)
        self.retry_deadlines: list[float] = []

    def with_retry_deadline(self, retry_seconds, stop):
        self.retry_deadlines.append(retry_seconds)
        return self

    def begin(self, project, run, request):
        self._service.take(self._who, "begin", [offer.rank for offer in request.offers])
        parts = [
            RankNegotiated(
                rank=offer.rank,
                chunks=[ChunkAnswer(digest=chunk.digest, status="present") for chunk in offer.chunks],
                finished=[],
            )
            for offer in request.offers
        ]
        return begun(parts if self._service.negotiates else [])

    def seal(self, checkpoint_id, rank, seal):
        self._service.take(self._who, "seal", [rank])
        return begun([])

    def seal_together(self, checkpoint_id, request):
        if not self._service.knows_joint_seals:
            raise RouteNotFound("PUT is not known there")
        self._service.take(self._who, "seal", [seal.rank for seal in request.seals])
        return begun([])


def begun(negotiated: list[RankNegotiated]) -> CheckpointBegun:
    view = {
        **dict.fromkeys(["health_reason", "digest", "committed_at", "aborted_at", "abort_reason", "abort_rank"]),
        **dict.fromkeys(["attempt", "step", "logical_bytes", "chunk_bytes", "uploaded_bytes", "sealed_ranks"], 0),
        **dict.fromkeys(["project", "run", "etag"], "x"),
    }
    return CheckpointBegun(
        id="ck_1",
        kind="periodic",
        world_size=8,
        state="uploading",
        health="ok",
        tier="hot",
        metrics={},
        labels=[],
        components={},
        created_at="2024-01-01T00:00:00Z",
        missing_ranks=[],
        negotiated=negotiated,
        **view,
    )


def digests_of(rank: int, count: int = 2) -> list[str]:
    return [hashlib.sha256(f"{rank} {number}".encode()).hexdigest() for number in range(count)]


def begin(host: HostCalls, client: FakeClient, rank: int, *, chunks: int = 2, step: int = 7) -> list[tuple[int, list]]:
    offer = FirstOffer(rank=rank, chunks=[ChunkOffer(digest=each, bytes=5) for each in digests_of(rank, chunks)])
    request = BeginCheckpoint(epoch=1, attempt=1, step=step, world_size=8, offers=[offer])
    parts = host.begin(client, "demo", "gpt", request).negotiated
    return [(part.rank, [chunk.digest for chunk in part.chunks]) for part in parts]


def seal(host: HostCalls, client: FakeClient, rank: int, *, chunks: int = 2) -> str:
    digests = digests_of(rank, chunks)
    report = SealShard(
        epoch=1, attempt=1, digest=shard_digest(digests), chunks=digests, index=IndexOrdinals(shard=0), metrics={}
    )
    return host.seal(client, "ck_1", rank, report).id


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.fixture
def service():
    fake = FakeService()
    yield fake
    fake.go_on.set()


@contextmanager
def hosts(service: FakeService, count: int, *, leader: bool = True):
    """Each rank's HostCalls; without `leader` that of rank 0 is not made."""
    made = {
        rank: HostCalls(service.client("joint"), secret=SECRET, count=count, leads=rank == 0)
        for rank in range(0 if leader else 1, count)
    }
    try:
        yield made
    finally:
        for host in made.values():
            host.close()
            host.close()
    until(lambda: not any(thread.name == "holdfast-host" for thread in threading.enumerate()))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def starting(service: FakeService, made: dict[int, HostCalls], call: Callable[..., object], **more: int):
    """Every rank makes this call on a thread of its own; their results by rank, to wait for."""
    with ThreadPoolExecutor(len(made)) as pool:
        yield {
            rank: pool.submit(outcome, lambda rank=rank, host=host: call(host, service.client(rank), rank, **more))
            for rank, host in made.items()
        }


def all_make(
    service: FakeService, made: dict[int, HostCalls], call: Callable[..., object], **more: int
) -> dict[int, object]:
    with starting(service, made, call, **more) as results:
        return {rank: result.result(LONG) for rank, result in results.items()}


@pytest.fixture
def patient(monkeypatch):
    """Only a whole group is made, however crowded the machine is."""
    monkeypatch.setattr(host_calls, "BEGIN_WINDOW_SECONDS", LONG)
    monkeypatch.setattr(host_calls, "SEAL_WINDOW_SECONDS", LONG)
    monkeypatch.setattr(host_calls, "SILENCE_SECONDS", LONG)


@pytest.mark.usefixtures("patient")
def test_eight_ranks_make_one_call_and_each_gets_its_own_part(service):
    with hosts(service, 8) as made:
        for step in (7, 8):
            parts = all_make(service, made, begin, step=step)
            assert parts == {rank: [(rank, digests_of(rank))] for rank in range(8)}
            assert all_make(service, made, seal) == dict.fromkeys(range(8), "ck_1")
    everybody = list(range(8))
    assert service.calls == [("joint", "begin", everybody), ("joint", "seal", everybody)] * 2


def test_a_late_rank_is_not_waited_for_and_makes_its_own_call(service):
    with hosts(service, 3) as made:
        assert all_make(service, {rank: made[rank] for rank in (0, 1)}, seal) == {0: "ck_1", 1: "ck_1"}
        assert sorted(rank for _, _, ranks in service.calls for rank in ranks) == [0, 1]
        assert seal(made[2], service.client(2), 2) == "ck_1"
    assert service.calls[-1] == (2, "seal", [2])


def test_ranks_that_come_one_after_the_other_are_in_one_call(service, monkeypatch, patient):
    monkeypatch.setattr(host_calls, "SEAL_WINDOW_SECONDS", 0.0)
    come, late, results = HostCalls._come, iter([1, 2]), {}

    with hosts(service, 4) as made, ThreadPoolExecutor(4) as pool:

        def another_comes(self, group):
            """Each time before the leader looks whether it is to wait on."""
            if (rank := next(late, None)) is not None:
                results[rank] = pool.submit(seal, made[rank], service.client(rank), rank)
                until(lambda: rank in group.calls)
            return come(self, group)

        monkeypatch.setattr(HostCalls, "_come", another_comes)
        results[0] = pool.submit(seal, made[0], service.client(0), 0)
        until(lambda: len(results) == 3)
        assert {rank: result.result(LONG) for rank, result in results.items()} == dict.fromkeys(range(3), "ck_1")
    assert service.calls == [("joint", "seal", [0, 1, 2])]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", [begin, seal])
@pytest.mark.parametrize("error", [CheckpointAborted, StaleAttempt, ServiceUnavailable, TransferStopped, ValueError])
def test_a_refused_joint_call_is_made_by_each_alone_and_only_the_refused_one_hears_it(service, call, error):
    service.refused[2] = error("refused")
    with hosts(service, 4) as made:
        results = all_make(service, made, call)
    assert {rank for rank, result in results.items() if isinstance(result, type)} == {2}
    assert results[2] is error
    assert service.calls[0] == ("joint", call.__name__, [0, 1, 2, 3])
    assert sorted(service.calls[1:]) == [(rank, call.__name__, [rank]) for rank in range(4)]


@pytest.mark.usefixtures("patient")
def test_a_joint_call_is_retried_no_longer_than_a_call_of_the_leader(service):
    client = service.client("joint")
    HostCalls(client, secret=SECRET, count=2, leads=False).close()
    assert client.retry_deadlines == [client.settings.retry_seconds]


@pytest.mark.usefixtures("patient")
def test_an_older_service_negotiates_nothing_and_seals_each_alone(service):
    service.negotiates = service.knows_joint_seals = False
    with hosts(service, 2) as made:
        assert all_make(service, made, begin) == {0: [], 1: []}
        assert all_make(service, made, seal) == {0: "ck_1", 1: "ck_1"}
    assert sorted(service.calls[1:]) == [(0, "seal", [0]), (1, "seal", [1])]


def test_the_ranks_that_wait_hear_that_the_leader_is_alive(service, monkeypatch, patient):
    monkeypatch.setattr(host_calls, "KEEP_ALIVE_SECONDS", 0.01)
    heard, receive = [], host_calls._Link.receive

    def listen(link):
        frame = receive(link)
        heard.append(frame)
        if heard.count(b"") == 3:
            service.go_on.set()
        return frame

    monkeypatch.setattr(host_calls._Link, "receive", listen)
    service.go_on.clear()
    with hosts(service, 2) as made:
        assert all_make(service, made, seal) == {0: "ck_1", 1: "ck_1"}
    assert service.calls == [("joint", "seal", [0, 1])]


def lead(secret: str, count: int, tell, keep_alive_seconds: float) -> None:
    """A leader whose joint call is never answered. It makes it when `count` ranks have come, and not before."""
    host_calls.KEEP_ALIVE_SECONDS = keep_alive_seconds
    host_calls.SEAL_WINDOW_SECONDS = LONG
    service = FakeService()
    service.go_on.clear()
    leader = HostCalls(service.client("joint"), secret=secret, count=count, leads=True)
    tell.send("listening")
    service.called.wait()
    tell.send("called")
    threading.Event().wait()
    leader.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_ranks_go_on_without_a_leader_that_dies_or_hangs(service, monkeypatch, patient, how):
    frames, receive = Counter(), host_calls._Link.receive

    def listen(link):
        frame = receive(link)
        frames[link] += 1
        return frame

    monkeypatch.setattr(host_calls._Link, "receive", listen)
    heard, said = SPAWN.Pipe(duplex=False)
    leader = SPAWN.Process(target=lead, args=(SECRET, 2, said, 0.05), daemon=True)
    leader.start()
    try:
        assert heard.recv() == "listening"
        with hosts(service, 3, leader=False) as made, starting(service, made, seal) as results:
            assert heard.recv() == "called"
            # Until then a slow leader is no silent one. The second frame from now is waited for by the new time.
            monkeypatch.setattr(host_calls, "SILENCE_SECONDS", 5.0)
            so_far = Counter(frames)
            until(lambda: len(frames) == 2 and all(frames[link] >= so_far[link] + 2 for link in frames))
            assert leader.pid is not None
            os.kill(leader.pid, how)
            assert [result.result(LONG) for result in results.values()] == ["ck_1", "ck_1"]
            again = all_make(service, made, begin)
            assert again == {rank: [(rank, digests_of(rank))] for rank in (1, 2)}
    finally:
        leader.kill()
        leader.join()
    assert sorted(service.calls) == sorted((rank, what, [rank]) for rank in (1, 2) for what in ("begin", "seal"))


def join(secret: str, count: int, rank: int) -> None:
    service = FakeService()
    seal(HostCalls(service.client("joint"), secret=secret, count=count, leads=False), service.client(rank), rank)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_dies_in_a_group_does_the_others_no_harm(service):
    service.go_on.clear()
    with hosts(service, 3) as made:
        made.pop(2).close()
        member = SPAWN.Process(target=join, args=(SECRET, 3, 2), daemon=True)
        member.start()
        with starting(service, made, seal) as results:
            assert service.called.wait(LONG)
            member.kill()
            member.join()
            service.go_on.set()
            assert [result.result(LONG) for result in results.values()] == ["ck_1", "ck_1"]
        assert service.calls == [("joint", "seal", [0, 1, 2])]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_what_waits_when_the_job_ends_is_sent_and_counts(service, ranks):
    """A rank's own client makes no more calls then."""
    with hosts(service, 3) as made:
        with starting(service, {rank: made[rank] for rank in ranks}, seal) as results:
            until(lambda: [sorted(group.calls) for group in made[0]._open.values()] == [ranks])
            made[0].flush(last=True)
            assert [result.result(LONG) for result in results.values()] == ["ck_1"] * len(ranks)
        assert seal(made[0], service.client(0), 0) == "ck_1"
    assert service.calls == [("joint", "seal", ranks), (0, "seal", [0])]


def test_another_users_process_is_called_by_nobody(service, monkeypatch):
    with hosts(service, 2) as made:
        monkeypatch.setattr(os, "geteuid", lambda: -1)
        assert seal(made[1], service.client(1), 1) == "ck_1"
    assert service.calls == [(1, "seal", [1])]


def test_a_rank_with_another_secret_calls_alone(service):
    with hosts(service, 2) as made:
        made[1]._secret = b"guessed"
        assert seal(made[1], service.client(1), 1) == "ck_1"
        stranger = HostCalls(service.client("joint"), secret="another", count=2, leads=False)
        assert seal(stranger, service.client(1), 1) == "ck_1"
    assert service.calls == [(1, "seal", [1])] * 2


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("says", [b"", b"\0\0\0\5hello", b"\xff\xff\xff\xff"])
def test_a_stranger_that_connects_holds_up_nobody(service, says):
    with hosts(service, 2) as made, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(made[0]._address)
        stranger.sendall(says)
        assert all_make(service, made, seal) == {0: "ck_1", 1: "ck_1"}
    assert service.calls == [("joint", "seal", [0, 1])]


def test_a_large_call_is_made_alone(service):
    with hosts(service, 2) as made:
        assert begin(made[1], service.client(1), 1, chunks=900) == [(1, digests_of(1, 900))]
        assert seal(made[0], service.client(0), 0, chunks=1500) == "ck_1"
    assert service.calls == [(1, "begin", [1]), (0, "seal", [0])]


@pytest.mark.parametrize(("bound", "chunks"), [("MOST_GROUP_BYTES", 2), ("MAX_BATCH", 400)])
def test_a_group_is_no_larger_than_a_call_may_be(service, monkeypatch, bound, chunks):
    monkeypatch.setattr(host_calls, "MOST_GROUP_BYTES", 1500 if bound == "MOST_GROUP_BYTES" else 512 * 1024)
    with hosts(service, 4) as made:
        assert all_make(service, made, seal, chunks=chunks) == dict.fromkeys(range(4), "ck_1")
    assert sorted(rank for _, _, ranks in service.calls for rank in ranks) == [0, 1, 2, 3]
    assert max(len(ranks) for _, _, ranks in service.calls) <= 2


def test_a_rank_that_calls_twice_is_in_two_groups(service):
    with hosts(service, 2) as made, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(seal, made[0], service.client(0), 0) for _ in range(2)]
        assert [each.result(LONG) for each in both] == ["ck_1", "ck_1"]
    assert service.calls == [(0, "seal", [0])] * 2


@pytest.mark.usefixtures("patient")
def test_a_second_thread_of_a_rank_does_not_wait_for_the_first(service):
    service.go_on.clear()
    with hosts(service, 2) as made, starting(service, made, seal) as results:
        assert service.called.wait(LONG)
        assert begin(made[1], service.client(1), 1) == [(1, digests_of(1))]
        service.go_on.set()
        assert [result.result(LONG) for result in results.values()] == ["ck_1", "ck_1"]
    assert service.calls == [("joint", "seal", [0, 1]), (1, "begin", [1])]


@pytest.mark.usefixtures("patient")
def test_ranks_that_wait_call_alone_when_the_leader_closes(service, monkeypatch):
    monkeypatch.setattr(host_calls, "KEEP_ALIVE_SECONDS", 0.01)
    service.go_on.clear()
    with hosts(service, 3) as made:
        with starting(service, made, seal) as results:
            assert service.called.wait(LONG)
            made[0].close()
            assert [result.result(LONG) for result in results.values()] == ["ck_1"] * 3
        service.go_on.set()
        assert all_make(service, made, begin) == {rank: [(rank, digests_of(rank))] for rank in range(3)}
    assert service.calls[0] == ("joint", "seal", [0, 1, 2])
    assert sorted(service.calls[1:]) == [(rank, what, [rank]) for rank in range(3) for what in ("begin", "seal")]


@pytest.mark.usefixtures("patient")
def test_a_rank_that_closes_while_it_waits_calls_alone(service):
    service.go_on.clear()
    with hosts(service, 2) as made, starting(service, made, seal) as results:
        assert service.called.wait(LONG)
        made[1].close()
        assert results[1].result(LONG) == "ck_1"
        service.go_on.set()
        assert results[0].result(LONG) == "ck_1"
    assert service.calls == [("joint", "seal", [0, 1]), (1, "seal", [1])]


def test_a_rank_that_is_alone_on_its_host_has_none_and_no_thread(service):
    assert HostCalls.of(service.client("joint"), secret=SECRET, count=1, leads=True) is None
    assert not any(thread.name == "holdfast-host" for thread in threading.enumerate())


@pytest.mark.usefixtures("patient")
def test_ranks_of_one_host_have_one_each_on_linux_alone(service, monkeypatch):
    made = {rank: HostCalls.of(service.client("joint"), secret=SECRET, count=2, leads=rank == 0) for rank in range(2)}
    assert all_make(service, made, seal) == {0: "ck_1", 1: "ck_1"}
    assert service.calls == [("joint", "seal", [0, 1])]
    for host in made.values():
        host.close()
    monkeypatch.setattr(host_calls, "sys", SimpleNamespace(platform="darwin"))
    assert HostCalls.of(service.client("joint"), secret=SECRET, count=2, leads=True) is None


def test_without_a_listener_the_leader_calls_alone(service):
    with hosts(service, 2):
        second = HostCalls(service.client("joint"), secret=SECRET, count=2, leads=True)
        assert seal(second, service.client(0), 0) == "ck_1"
        second.close()
    assert service.calls == [(0, "seal", [0])]
