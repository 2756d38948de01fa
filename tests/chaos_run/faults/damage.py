"""Disks: stored bytes that are others than were stored, and a disk that is full."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from pathlib import Path

import psycopg

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointState
from tests.chaos_run.faults.base import Arena, Fault, Strike
from tests.chaos_run.job import Job
from tests.chaos_run.journal import LARGEST_FILE_BYTES
from tests.chaos_run.place import PROJECT
from tests.support.damage import flip

_FULL_SECONDS = (2.0, 5.0)
_SMALL_FILE_BYTES = 2 * LARGEST_FILE_BYTES
_KEY_OF_CHUNK = """
    SELECT copies.project_id, encode(copies.generation, 'hex') FROM copies JOIN chunks ON chunks.id = copies.chunk_id
    WHERE chunks.digest = decode(%s, 'hex') AND copies.state NOT IN ('gone', 'bad') ORDER BY copies.id DESC LIMIT 1
"""


def corrupt_store(arena: Arena, kind: str) -> Strike | None:
    """A chunk of the newest checkpoint has other bytes when the job comes back: it must find out, and train on from
    what is right."""
    job = arena.a_job()
    if len(_newest_two(arena, job)) < 2:
        return None
    with job.held_down(kind):
        newest = _newest_two(arena, job)
        # Not what the one before has as well (the layout): with a single store that would take all of them away, which
        # is what a second store is for.
        own, before = (digests_of(arena, view) for view in newest)
        digest = arena.numbers.choice(sorted(own - before))
        view = newest[0]
        arena.damaged.add(digest)
        _put_wrong_bytes(arena, digest)
        return Strike([job], f"{job.name}: chunk {digest[:12]} of step {view.step}")


def corrupt_local_tier(arena: Arena, kind: str) -> Strike | None:
    """A chunk in the local tier has other bytes when the job comes back: the store's are taken."""
    job = next((job for job in arena.jobs if job.local is not None), None)
    if job is None or job.local is None:
        return None
    if not _chunk_files(job, arena.numbers):
        return None
    with job.held_down(kind):
        files = _chunk_files(job, arena.numbers)
        for file in files:
            flip(file)
        return Strike([job], f"{job.name}: {len(files)} chunks on its disk")


def fill_disk(arena: Arena, kind: str) -> Strike | None:
    """Not a byte is left in the local tier of one job; or its ranks may write no file of a chunk's size any more, as
    where a limit is met, and wherever no disk could be made that is small enough to be filled."""
    job = next((job for job in arena.jobs if job.local is not None), None)
    if job is None:
        return None
    seconds = arena.numbers.uniform(*_FULL_SECONDS)
    if arena.small_disk is None or arena.numbers.random() < 0.3:
        before = job.limit_files(_SMALL_FILE_BYTES)
        arena.over.wait(seconds)
        job.limit_files(resource.RLIM_INFINITY)
        return Strike([job], f"{job.name}: {before} ranks limited for {seconds:.1f} s") if before else None
    filler = arena.small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    arena.over.wait(seconds)
    filler.unlink()
    return Strike([job], f"{job.name}: full for {seconds:.1f} s")


def _newest_two(arena: Arena, job: Job) -> list[CheckpointView]:
    return arena.place.client.checkpoints.list(PROJECT, job.name, state=CheckpointState.COMMITTED, limit=2).items


def digests_of(arena: Arena, view: CheckpointView) -> set[str]:
    shards = [arena.place.client.checkpoints.shard_chunks(view.id, rank) for rank in range(view.world_size)]
    return {chunk.digest for shard in shards for chunk in shard.chunks}


def _put_wrong_bytes(arena: Arena, digest: str) -> None:
    """With the owner's keys, around the service, as a disk would: size and key stay what they are."""
    with psycopg.connect(arena.place.database_url.replace("+psycopg", "")) as connection:
        row = connection.execute(_KEY_OF_CHUNK, [digest]).fetchone()
    assert row is not None, "a committed checkpoint has its chunks"
    project_id, generation = row
    weed = arena.place.weed
    where = f"/{weed.bucket}/checkpoints/{project_id}/chunks/{digest[:2]}/{digest}/{generation}"
    data = bytearray(weed.signed("GET", where).data)
    data[arena.numbers.randrange(len(data))] ^= 1 << arena.numbers.randrange(8)
    put = weed.signed("PUT", where, body=bytes(data))
    assert put.status == 200, put.data


def _chunk_files(job: Job, numbers: random.Random) -> list[Path]:
    assert job.local is not None
    files = [
        Path(folder) / name
        for folder, _, names in os.walk(job.local)
        for name in names
        if len(name) == 64 and not set(name) - set("0123456789abcdef")
    ]
    return numbers.sample(sorted(files), k=min(3, len(files)))


_IN_STORE, _ON_DISK = "wrong bytes in the store", "wrong bytes on the local disk"
FILLS_DISK = "full local disk"
SPOILS = (_IN_STORE, _ON_DISK)
"""After these the newest checkpoint may have to be left for the one before."""

FAULTS: dict[str, Fault] = {
    _IN_STORE: corrupt_store,
    _ON_DISK: corrupt_local_tier,
    FILLS_DISK: fill_disk,
}
