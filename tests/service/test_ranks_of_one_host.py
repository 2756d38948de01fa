"""Ranks of one host that begin and seal in one call: each gets what it would get alone, or nothing is done for any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from sqlalchemy import func, select

import holdfast_service.training.commit
from holdfast_service.db.tables.core import ChunkList, Copy, ShardChunk
from tests.support.interleave import hold_before, overlap, refused
from tests.support.rank import Job, Save, answer, offer_of, seal_of
from tests.support.service import RunningService

RANKS = 4
CHUNKS = {rank: [f"weights of {rank}".encode(), f"index of {rank}".encode()] for rank in range(RANKS)}


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http(), world_size=RANKS)


def begin(job: Job, shards: Mapping[int, Sequence[bytes]], step: int = 1) -> Save:
    return job.begin(step, offers=[offer_of(rank, chunks) for rank, chunks in shards.items()])


def send(save: Save, shards: Mapping[int, Sequence[bytes]]) -> None:
    for negotiated in save.view["negotiated"]:
        save.send(shards[negotiated["rank"]], negotiated["chunks"])


def begun_and_sent(job: Job, shards: Mapping[int, Sequence[bytes]] = CHUNKS) -> Save:
    save = begin(job, shards)
    send(save, shards)
    return save


def count_of(service: RunningService, rows: Any) -> int:
    with service.context.database.read() as session:
        return int(session.scalar(select(func.count()).select_from(rows)) or 0)


def read_back(service: RunningService, save: Save, rank: int) -> list[str]:
    shard = answer(service.http().get(f"/v1/checkpoints/{save.id}/shards/{rank}"))
    return [chunk["digest"] for chunk in shard["chunks"]]


@pytest.mark.rule("one-checkpoint-per-step")
@pytest.mark.rule("commit-before-reply")
def test_two_calls_of_a_host_commit_what_its_ranks_have_sent(service: RunningService, job: Job) -> None:
    save = begin(job, CHUNKS)
    assert [each["rank"] for each in save.view["negotiated"]] == list(CHUNKS)
    send(save, CHUNKS)
    view = save.seal_together(CHUNKS)
    assert (view["state"], view["sealed_ranks"], view["missing_ranks"]) == ("committed", RANKS, [])
    assert [read_back(service, save, rank) for rank in CHUNKS] == [
        seal_of(rank, CHUNKS[rank])["chunks"] for rank in CHUNKS
    ]
    assert view["logical_bytes"] == sum(len(data) for chunks in CHUNKS.values() for data in chunks)


def test_hosts_and_lone_ranks_complete_one_checkpoint(job: Job) -> None:
    first, second = {0: CHUNKS[0], 1: CHUNKS[1]}, {2: CHUNKS[2]}
    save = begun_and_sent(job, first)
    assert begun_and_sent(job, second).id == save.id
    save.upload(3, CHUNKS[3])
    assert save.seal_together(second)["missing_ranks"] == [0, 1, 3]
    assert save.seal(3, CHUNKS[3])["sealed_ranks"] == 2
    assert save.seal_together(first)["state"] == "committed"


@pytest.mark.rule("reuse-only-hashed")
def test_ranks_that_offer_the_same_chunk_each_send_their_own_copy_and_share_a_list(
    service: RunningService, job: Job
) -> None:
    """One rank may die before it has sent: its copy helps nobody else."""
    same = {rank: [b"replicated", b"the same index"] for rank in (1, 2)}
    save = begin(job, same)
    answers = [[each["status"] for each in negotiated["chunks"]] for negotiated in save.view["negotiated"]]
    assert answers == [["upload", "upload"]] * 2
    assert count_of(service, Copy) == 4
    send(save, same)
    assert save.seal_together(same)["sealed_ranks"] == 2
    assert count_of(service, ChunkList) == 1
    assert begin(job, {3: same[1]}).view["negotiated"][0]["chunks"][0]["status"] == "present"


@pytest.mark.rule("present-is-referenced")
def test_a_begin_that_is_repeated_reserves_nothing_twice(service: RunningService, job: Job) -> None:
    """The reply was lost, and meanwhile one of the ranks has called alone."""
    first = begin(job, CHUNKS)
    first.negotiate(2, CHUNKS[2])
    again = begin(job, CHUNKS)
    assert (again.id, count_of(service, Copy), count_of(service, ShardChunk)) == (first.id, 2 * RANKS, 2 * RANKS)
    send(first, CHUNKS)
    assert again.seal_together(CHUNKS)["state"] == "committed"


def test_an_offer_that_is_refused_leaves_the_begin_and_each_rank_asks_alone(service: RunningService, job: Job) -> None:
    save = begin(job, {0: CHUNKS[0], RANKS: CHUNKS[1]})
    assert (save.view["state"], save.view["negotiated"], count_of(service, Copy)) == ("uploading", [], 0)
    with refused("invalid_request"):
        save.negotiate(RANKS, CHUNKS[1])
    assert [each["status"] for each in save.negotiate(0, CHUNKS[0])["chunks"]] == ["upload", "upload"]


@pytest.mark.rule("quota-reserved")
def test_the_quota_counts_what_all_the_ranks_offer(service: RunningService) -> None:
    service.make_project("small", quota_bytes=sum(map(len, CHUNKS[0])))
    save = begin(Job(service.http(), "small/run", world_size=RANKS), {0: CHUNKS[0], 1: CHUNKS[1]})
    assert save.view["negotiated"] == []
    assert save.negotiate(0, CHUNKS[0])["chunks"][0]["status"] == "upload"


@pytest.mark.rule("seal-only-negotiated")
def test_nothing_is_sealed_if_a_chunk_of_one_rank_is_missing(job: Job) -> None:
    save = begin(job, CHUNKS)
    for negotiated in save.view["negotiated"][:-1]:
        save.send(CHUNKS[negotiated["rank"]], negotiated["chunks"])
    with refused("incomplete_checkpoint") as caught:
        save.seal_together(CHUNKS)
    assert sorted(caught.value.context["digests"]) == sorted(seal_of(3, CHUNKS[3])["chunks"])
    assert save.now()["sealed_ranks"] == 0
    assert save.seal(0, CHUNKS[0])["sealed_ranks"] == 1
    save.send(CHUNKS[3], save.view["negotiated"][-1]["chunks"])
    assert save.seal_together(CHUNKS)["state"] == "committed"


@pytest.mark.rule("seal-only-negotiated")
def test_a_rank_is_not_sealed_with_what_another_rank_of_its_call_has_negotiated(job: Job) -> None:
    save = begun_and_sent(job)
    with refused("chunk_not_negotiated"):
        save.seal_together(CHUNKS | {1: CHUNKS[0]})
    assert save.now()["sealed_ranks"] == 0


@pytest.mark.rule("commit-before-reply")
def test_seals_that_are_repeated_are_counted_once(job: Job) -> None:
    save = begun_and_sent(job)
    first = {rank: CHUNKS[rank] for rank in (0, 1, 2)}
    assert save.seal(1, CHUNKS[1])["sealed_ranks"] == 1
    assert save.seal_together(first)["sealed_ranks"] == 3
    assert save.seal_together(first)["sealed_ranks"] == 3
    committed = save.seal_together(CHUNKS)
    assert committed["state"] == "committed"
    assert save.seal_together(CHUNKS)["etag"] == committed["etag"]


def test_other_content_than_was_sealed_is_refused_and_seals_nothing_else(job: Job) -> None:
    save = begun_and_sent(job)
    save.seal(1, CHUNKS[1])
    with refused("manifest_conflict") as caught:
        save.seal_together({1: CHUNKS[1][1:], 2: CHUNKS[2]})
    assert (caught.value.context["rank"], save.now()["sealed_ranks"]) == (1, 1)


@pytest.mark.rule("fencing-token")
def test_a_fenced_attempt_seals_nothing(service: RunningService, job: Job) -> None:
    save = begun_and_sent(job)
    Job(service.http(), after=1)
    with refused("stale_attempt"):
        save.seal_together(CHUNKS)


@pytest.mark.parametrize(
    "seals",
    [
        [],
        [{"rank": 1}, {"rank": 1}],
        [{"rank": 1}, {"rank": 2, "attempt": 7}],
        [{"rank": 1}, {"rank": 2, "chunks": ["0" * 64] * 1000}],
    ],
    ids=["none", "a rank twice", "two attempts", "too many chunks"],
)
def test_seals_that_do_not_belong_together_are_refused(job: Job, seals: list[dict[str, Any]]) -> None:
    save = begun_and_sent(job)
    body = [job.fence | seal_of(each["rank"], CHUNKS[each["rank"]]) | each for each in seals]
    with refused("invalid_request"):
        answer(job.http.put(f"/v1/checkpoints/{save.id}/shards", json={"seals": body}))
    assert save.now()["sealed_ranks"] == 0


def test_a_begin_that_names_a_rank_twice_is_refused(job: Job) -> None:
    with refused("invalid_request"):
        job.begin(1, offers=[offer_of(1, CHUNKS[1]), offer_of(1, CHUNKS[2])])


@pytest.mark.rule("commit-before-reply")
def test_of_the_last_two_hosts_that_seal_at_the_same_moment_one_commits(
    service: RunningService, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = begun_and_sent(job)
    gate = hold_before(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    first, second = ({rank: CHUNKS[rank] for rank in ranks} for ranks in ((0, 1), (2, 3)))
    sealing, other = overlap(service, gate, lambda: save.seal_together(first), lambda: save.seal_together(second))
    assert {sealing.result()["state"], other.result()["state"]} == {"uploading", "committed"}
    assert save.now()["sealed_ranks"] == RANKS


@pytest.mark.rule("commit-before-reply")
def test_a_rank_that_seals_alone_while_its_host_seals_it_is_counted_once(
    service: RunningService, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was silent for too long, and yet alive."""
    save = begun_and_sent(job)
    gate = hold_before(monkeypatch, holdfast_service.training.commit, "complete_if_whole")
    together, alone = overlap(service, gate, lambda: save.seal_together(CHUNKS), lambda: save.seal(2, CHUNKS[2]))
    assert (together.result()["state"], alone.result()["state"]) == ("committed", "committed")
    assert save.now()["sealed_ranks"] == RANKS
