"""Fetchers of one host with a folder between them: each chunk is got once, wrong bytes never get into it."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import signal
import threading

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.host_chunks import HostChunks
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.private_folder import job_folder_in_use, new_job_folder
from tests.support.scripted_http import Reply, ScriptedServer, as_json

spawn = multiprocessing.get_context("spawn")
BODIES = [bytes([number]) * 5_000 for number in range(1, 13)]
CHUNKS = {hashlib.sha256(body).hexdigest(): body for body in BODIES}


class Service(ScriptedServer):
    """Hands out tickets and chunks. `wrong`: digests whose bytes are wrong, with how many GETs of each are.
    `hang_first`: the first GET gets no answer until `let_go` is set."""

    def __init__(self) -> None:
        self.wrong: dict[str, int] = {}
        self.hang_first = False
        self.got_first, self.let_go = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        super().__init__(self.respond)

    def respond(self, seen):
        if seen.path.endswith("/reads") and seen.method == "POST":
            return as_json(
                {
                    "lease_id": "lease-1",
                    "lease_expires_in_seconds": 60,
                    "chunks": [
                        {
                            "digest": digest,
                            "bytes": len(CHUNKS[digest]),
                            "stored_bytes": len(CHUNKS[digest]),
                            "kind": "http",
                            "url": f"/store/{digest}",
                            "headers": {},
                            "expires_in_seconds": 60,
                        }
                        for digest in seen.json["digests"]
                    ],
                }
            )
        if seen.path.endswith("/chunk-reports"):
            digest = seen.json["digest"]
            return as_json({"digest": digest, "readable": True, "detail": "it is good", "corrupt_checkpoints": []})
        if seen.path.startswith("/store/"):
            return self.chunk(seen.path.removeprefix("/store/"))
        return as_json({"proof_id": None, "path": None, "expires_in_seconds": 60})

    def chunk(self, digest: str) -> Reply:
        with self.lock:
            first, self.hang_first = self.hang_first, False
            is_wrong = self.wrong.get(digest, 0) > 0
            self.wrong[digest] = self.wrong.get(digest, 0) - 1
        if first:
            self.got_first.set()
            self.let_go.wait(60)
        return Reply(200, bytes(len(CHUNKS[digest])) if is_wrong else CHUNKS[digest])

    def gets(self) -> list[str]:
        return [seen.path.removeprefix("/store/") for seen in self.seen if seen.path.startswith("/store/")]


@pytest.fixture
def service():
    server = Service()
    yield server
    server.let_go.set()
    server.close()


@pytest.fixture
def folder(tmp_path):
    made = ChunkFolder(tmp_path / "chunks", limit_bytes=10**9)
    yield made
    made.close()


def fetch(url, folder, shared, wanted=tuple(CHUNKS)):
    """(what arrived, bytes taken from the folder)."""
    arrived = {}
    host = HostChunks(folder, shared)
    with Client(ClientSettings(url=url, token="t", retry_seconds=60)) as client:
        with ShardFetcher(client, "ck_1") as fetcher:
            fetcher.fetch(wanted, lambda digest, view: arrived.__setitem__(digest, bytes(view)), host=host)
    return arrived, host.taken_bytes


def fetch_in_process(url, path, shared, result):
    folder = ChunkFolder(path, limit_bytes=10**9)
    result.send(fetch(url, folder, shared))


def start_process(url, folder, shared=tuple(CHUNKS)):
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=fetch_in_process, args=(url, folder.path, shared, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_two_processes_at_once_get_each_chunk_once(service, folder):
    started = [start_process(service.url, folder) for _ in range(2)]
    results = [result.recv() for _, result in started]
    for process, _ in started:
        process.join(30)
    assert [arrived for arrived, _ in results] == [CHUNKS, CHUNKS]
    assert sorted(service.gets()) == sorted(CHUNKS)
    assert sum(taken for _, taken in results) == sum(map(len, BODIES))


def test_a_process_that_is_killed_while_it_fetches_holds_nobody_up(service, folder):
    service.hang_first = True
    process, _ = start_process(service.url, folder)
    assert service.got_first.wait(60)
    other, result = start_process(service.url, folder)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    arrived, _ = result.recv()
    other.join(30)
    assert arrived == CHUNKS
    assert len(service.gets()) <= len(CHUNKS) + 8, "only what the dead one had under way is got again"


def test_what_is_not_shared_goes_the_direct_way_and_leaves_no_file(service, folder):
    shared = tuple(CHUNKS)[:4]
    assert fetch(service.url, folder, shared)[0] == CHUNKS
    assert {path.name for path in folder.path.glob("[0-9a-f][0-9a-f]/*")} == set(shared)


def test_what_the_host_has_needs_no_ticket_and_no_service(service, folder):
    for digest, body in CHUNKS.items():
        folder.add(digest, body, durable=False)
    arrived, taken = fetch(service.url, folder, ())
    assert arrived == CHUNKS
    assert taken == sum(map(len, BODIES))
    assert service.seen == []


def test_a_wrong_file_of_the_host_is_fetched_instead(service, folder):
    digest = next(iter(CHUNKS))
    for each, body in CHUNKS.items():
        folder.add(each, body, durable=False)
    path = folder.path / digest[:2] / digest
    path.write_bytes(bytes(len(CHUNKS[digest])))
    assert fetch(service.url, folder, (digest,))[0] == CHUNKS
    assert service.gets() == [digest]
    assert path.read_bytes() == CHUNKS[digest]


def test_wrong_bytes_from_the_store_never_get_into_the_folder(service, folder):
    digest = next(iter(CHUNKS))
    service.wrong[digest] = 2
    with pytest.raises(errors.ReadsWrongHere):
        fetch(service.url, folder, tuple(CHUNKS), (digest,))
    assert folder.size(digest) is None
    service.wrong[digest] = 1
    assert fetch(service.url, folder, tuple(CHUNKS), (digest,))[0] == {digest: CHUNKS[digest]}
    assert folder.size(digest) == len(CHUNKS[digest])


def test_a_folder_without_room_costs_a_second_get_and_nothing_else(service, tmp_path):
    folder = ChunkFolder(tmp_path / "small", limit_bytes=len(BODIES[0]) - 1)
    for _ in range(2):
        assert fetch(service.url, folder, tuple(CHUNKS))[0] == CHUNKS
    assert len(service.gets()) == 2 * len(CHUNKS)
    folder.close()


def test_a_folder_that_is_gone_costs_nothing_but_its_use(service, tmp_path):
    with new_job_folder(tmp_path) as path:
        folder = ChunkFolder(path, limit_bytes=10**9)
    assert not path.exists()
    assert fetch(service.url, folder, tuple(CHUNKS))[0] == CHUNKS
    folder.close()


def test_a_folder_that_cannot_be_read_just_now_costs_a_transfer_and_nothing_else(service, tmp_path, monkeypatch):
    folder = ChunkFolder(tmp_path / "cache", limit_bytes=10**9)
    for digest, body in CHUNKS.items():
        folder.add(digest, body, durable=False)

    def refused(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refused)
    assert fetch(service.url, folder, tuple(CHUNKS))[0] == CHUNKS
    monkeypatch.setattr(ChunkFolder, "size", refused)
    assert fetch(service.url, folder, tuple(CHUNKS))[0] == CHUNKS
    folder.close()


def test_a_file_of_another_size_on_the_host_is_skipped(service, tmp_path):
    folder = ChunkFolder(tmp_path / "cache", limit_bytes=10**9)
    digest, body = next(iter(CHUNKS.items()))
    folder.add(digest, body, durable=False)
    (tmp_path / "cache" / digest[:2] / digest).write_bytes(body * 100)
    arrived = {}
    with Client(ClientSettings(url=service.url, token="t")) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(
            [digest],
            lambda found, view: arrived.__setitem__(found, bytes(view)),
            host=HostChunks(folder, ()),
            sizes={digest: len(body)},
        )
    assert arrived == {digest: body}
    folder.close()


def hold_job_folder(where, ready):
    with new_job_folder(where) as path:
        ChunkFolder(path, limit_bytes=10**9).add(*next(iter(CHUNKS.items())), durable=False)
        ready.send(path)
        threading.Event().wait()


def test_a_dead_jobs_folder_is_swept_by_the_next_job_and_a_living_ones_stays(tmp_path):
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=hold_job_folder, args=(tmp_path, theirs), daemon=True)
    process.start()
    path = ours.recv()
    with new_job_folder(tmp_path) as own:
        assert path.exists()
        assert own.stat().st_mode & 0o777 == 0o700
    assert not own.exists()
    with job_folder_in_use(path):
        process.kill()
        process.join()
        with new_job_folder(tmp_path):
            assert path.exists(), "another rank of the dead leader's job still uses it"
    with new_job_folder(tmp_path) as own:
        assert not path.exists()
        assert [each.name for each in own.parent.iterdir()] == [own.name]


def test_a_job_folder_is_never_made_where_another_users_name_or_link_leads(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"holdfast-{os.geteuid()}").symlink_to(elsewhere)
    with pytest.raises(OSError):
        with new_job_folder(tmp_path):
            pytest.fail("it was made through a link")
    assert list(elsewhere.iterdir()) == []
