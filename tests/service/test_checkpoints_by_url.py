"""`holdfast://…` without torch: projects, runs and checkpoints as folders, leases of open files, deletion, a store with
wrong bytes, threads and forked processes. On a posix store and on a real S3 server."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest
from sqlalchemy import select

import holdfast_client.chunks.fetcher
from holdfast_client.client import Client
from holdfast_client.errors import ChunkGone, ChunkLost, ConfigurationError, ServiceUnavailable
from holdfast_client.filesystem import checkpoint_files, fsspec_filesystem
from holdfast_client.filesystem.fsspec_filesystem import HoldfastFile, HoldfastFileSystem
from holdfast_client.settings import ClientSettings
from holdfast_protocol.checkpoints import EditCheckpoint
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import Health, Scope
from holdfast_service.db.tables.core import ReadLease
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.service.conftest import Clock
from tests.support.little_checkpoints import SIZE_BYTES, save_little_checkpoint
from tests.support.rank import answer
from tests.support.retention import HOUR, purge, states
from tests.support.rot import flip, key_of, stored
from tests.support.service import RunningService
from tests.support.tiers import DAY, Cold

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

RUN = "demo/doctor"
FILE = f"{RUN}@latest/sample.safetensors"


@pytest.fixture
def client(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Saves. What reads is found through the environment, and may only read."""
    service.make_project("demo")
    with Client(ClientSettings(url=service.url, token=service.token())) as connected:
        connected.projects.edit("demo", EditProject())
        monkeypatch.setenv("HOLDFAST_URL", service.url)
        monkeypatch.setenv("HOLDFAST_TOKEN", service.token(Scope.READ))
        monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "10")
        fsspec.register_implementation("holdfast", HoldfastFileSystem, clobber=True)
        fsspec_filesystem._READERS.begin_anew()  # a process keeps them, and what other tests have read
        yield connected


def leases(service: RunningService) -> list[ReadLease]:
    with service.context.database.read() as session:
        return list(session.scalars(select(ReadLease)))


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def content_of(service: RunningService, client: Client, step: int) -> tuple[str, bytes]:
    """The digest and the bytes of the one chunk with data of a little checkpoint."""
    view = client.checkpoints.select("demo", "doctor", str(step))
    digest = client.checkpoints.shard_chunks(view.id, 0).chunks[0].digest
    return digest, stored(service.context.store, key_of(service, digest))


def test_folders_and_files_are_listed_and_read(service: RunningService, client: Client) -> None:
    for _ in range(2):
        save_little_checkpoint(client, "demo")
    fs = HoldfastFileSystem()
    assert fs.ls("holdfast://", detail=False) == ["demo"]
    assert fs.ls("demo", detail=False) == [RUN]
    assert fs.ls(f"holdfast://{RUN}", detail=False) == [f"{RUN}@2#2", f"{RUN}@1#1"]
    files = fs.ls(f"{RUN}@1")
    assert [each["name"] for each in files] == [f"{RUN}@1/checkpoint.json", f"{RUN}@1/sample.safetensors"]
    assert {each["step"] for each in files} == {1}
    view = client.checkpoints.select("demo", "doctor", "1")
    info = fs.info(f"{RUN}@1#1/sample.safetensors")
    assert (info["checkpoint_id"], info["digest"], info["type"]) == (view.id, view.digest, "file")
    assert fs.created(f"{RUN}@1") == view.committed_at
    assert sorted(fs.find(RUN)) == sorted(
        f"{RUN}@{n}#{n}/{f}" for n in (1, 2) for f in ("checkpoint.json", "sample.safetensors")
    )
    facts = json.loads(fs.cat_file(f"{RUN}@{view.id}/checkpoint.json"))
    assert (facts["step"], facts["files"], facts["id"]) == (1, ["sample.safetensors"], view.id)

    _, content = content_of(service, client, 2)
    with fsspec.open(f"holdfast://{FILE}") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        assert header["bytes"] == {"dtype": "U8", "shape": [SIZE_BYTES], "data_offsets": [0, SIZE_BYTES]}
        assert file.read() == content
        assert file.read(1) == b""
        assert file.seek(begin + 1000) == begin + 1000
        buffer = bytearray(2 * SIZE_BYTES)
        assert file.readinto(buffer) == SIZE_BYTES - 1000
        assert buffer[: SIZE_BYTES - 1000] == content[1000:]
        assert file.seek(-5, 2) == begin + SIZE_BYTES - 5
        assert file.read(100) == content[-5:]
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
    assert fs.cat_file(FILE, begin + 7, begin + 17) == content[7:17]
    assert fs.cat_file(FILE, -10, -3) == content[-10:-3]
    assert fs.cat_file(FILE) == fs.cat_file(FILE, 0, begin) + content
    assert fs.cat_file(FILE, 10**9) == b""
    assert not leases(service)


def test_what_is_not_there_is_said_as_python_says_it_and_nothing_is_written(
    service: RunningService, client: Client, tmp_path: Path
) -> None:
    save_little_checkpoint(client, "demo")
    fs = HoldfastFileSystem()
    for path in (
        "other",
        "demo/other",
        f"{RUN}@7",
        f"{RUN}@7/sample.safetensors",
        f"{RUN}@latest/model.safetensors",
        f"{RUN}/x/y",
    ):
        assert not fs.exists(path)
        with pytest.raises(FileNotFoundError):
            fs.info(path)
    with pytest.raises(FileNotFoundError, match=r"It has sample.safetensors, checkpoint.json"):
        fs.open(f"{RUN}@latest/model.safetensors")
    with pytest.raises(FileNotFoundError, match="does not say which checkpoint"):
        fs.open(f"{RUN}/model.safetensors")
    with pytest.raises(IsADirectoryError, match="name one of its files"):
        fs.open(f"{RUN}@latest")
    assert fs.isdir(f"{RUN}@latest")
    assert fs.isfile(FILE)
    (tmp_path / "x").write_bytes(b"x")
    for write in (
        lambda: fs.open(FILE, "wb"),
        lambda: fs.pipe_file(FILE, b""),
        lambda: fs.rm(f"{RUN}@latest", recursive=True),
        lambda: fs.mkdir("demo/new"),
        lambda: fs.mv(FILE, f"{RUN}@1/x"),
        lambda: fs.put(str(tmp_path / "x"), FILE),
    ):
        with pytest.raises(OSError, match="read-only") as refused:
            write()
        assert refused.value.errno == errno.EROFS
    assert not leases(service)


def test_whoever_reads_an_older_checkpoint_than_the_newest_hears_of_it(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        save_little_checkpoint(client, "demo")
    fs = HoldfastFileSystem()
    fsspec_filesystem._warn_once.cache_clear()
    fs.open(FILE).close()
    assert "Passed over" not in caplog.text
    newest = client.checkpoints.select("demo", "doctor", "latest")
    edited = EditCheckpoint(health=Health.QUARANTINED, health_reason="a loss spike")
    client.checkpoints.edit(newest.id, edited, newest.etag)
    for _ in range(3):
        fs.open(FILE).close()
    assert caplog.text.count(f"{RUN}@latest is step 1. Passed over: 2 (quarantined: a loss spike).") == 1


def test_the_key_of_a_file_changes_with_its_content(client: Client) -> None:
    save_little_checkpoint(client, "demo")
    fs = HoldfastFileSystem()
    facts = f"{RUN}@latest/checkpoint.json"
    before = (fs.ukey(FILE), fs.ukey(facts))
    view = client.checkpoints.select("demo", "doctor", "latest")
    client.checkpoints.edit(view.id, EditCheckpoint(labels=["milestone"]), view.etag)
    assert (fs.ukey(FILE) == before[0], fs.ukey(facts) == before[1]) == (True, False)
    save_little_checkpoint(client, "demo")
    assert fs.ukey(FILE) != before[0]


def test_a_service_that_does_not_answer_is_no_missing_file(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "0")
    with pytest.raises(ServiceUnavailable):
        HoldfastFileSystem().exists(FILE)


def test_an_open_file_stays_with_its_checkpoint_in_another_process_too(service: RunningService, client: Client) -> None:
    save_little_checkpoint(client, "demo")
    fs = HoldfastFileSystem()
    with fs.open(FILE) as file:
        save_little_checkpoint(client, "demo")
        file.seek(-SIZE_BYTES, 2)
        copied = pickle.loads(pickle.dumps(file))
        assert copied.read() == file.read() == content_of(service, client, 1)[1]
        copied.close()
    assert fs.cat_file(FILE, -SIZE_BYTES) == content_of(service, client, 2)[1]


@pytest.mark.rule("read-lease")
def test_an_open_file_holds_a_lease_that_reading_renews_and_the_last_close_ends(
    service: RunningService, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_little_checkpoint(client, "demo")
    monkeypatch.setattr(holdfast_client.chunks.fetcher, "_RENEW_LEASE_AT", 0.0)  # due at once, whatever the clock says
    fs = HoldfastFileSystem()
    assert fs.info(FILE)["size"] > SIZE_BYTES
    assert not leases(service), "whoever only asked keeps nothing"
    first, second = fs.open(FILE), fs.open(FILE)
    first.read()
    [before] = leases(service)
    clock.advance(60)
    first.seek(0)
    first.read()  # from the cache: another thread renews the lease
    until(lambda: [(each.expires_at - before.expires_at).total_seconds() >= 60 for each in leases(service)] == [True])
    assert [each.id for each in leases(service)] == [before.id]
    first.close()
    first.close()
    assert len(leases(service)) == 1
    second.close()
    until(lambda: not leases(service))
    forgotten = fs.open(FILE)
    assert len(leases(service)) == 1
    del forgotten
    gc.collect()
    until(lambda: not leases(service))


def test_a_read_from_memory_and_the_collector_wait_for_no_service(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_little_checkpoint(client, "demo")
    _, content = content_of(service, client, 1)
    monkeypatch.setattr(holdfast_client.chunks.fetcher, "_RENEW_LEASE_AT", 0.0)
    fs = HoldfastFileSystem()
    file, forgotten = fs.open(FILE), fs.open(FILE)
    assert file.read()[-SIZE_BYTES:] == content
    called_on, go_on = queue.SimpleQueue[str](), threading.Event()

    def silent(call: Callable[..., Any]) -> Callable[..., Any]:
        def answered_late(*args: Any, **kwargs: Any) -> Any:
            called_on.put(threading.current_thread().name)
            assert go_on.wait(60)
            return call(*args, **kwargs)

        return answered_late

    restores = fs._reader.parts.client.restores
    for name in ("read_chunks", "release"):
        monkeypatch.setattr(restores, name, silent(getattr(restores, name)))
    for _ in range(2):
        file.seek(-SIZE_BYTES, 2)
        assert file.read() == content
    del forgotten
    gc.collect()
    assert called_on.get(timeout=60).startswith("holdfast-beside-reads")
    go_on.set()
    file.close()
    until(lambda: not leases(service))


def test_close_waits_a_moment_for_a_service_that_does_not_answer_and_no_longer(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_little_checkpoint(client, "demo")
    monkeypatch.setattr(checkpoint_files, "CLOSE_SECONDS", 0.01)
    fs = HoldfastFileSystem()
    file, go_on = fs.open(FILE), threading.Event()
    restores = fs._reader.parts.client.restores
    release = restores.release

    def answered_late(lease_id: str) -> None:
        assert go_on.wait(60), "close has waited for the service"
        release(lease_id)

    monkeypatch.setattr(restores, "release", answered_late)
    file.close()
    assert len(leases(service)) == 1
    go_on.set()
    until(lambda: not leases(service))


def test_a_service_that_does_not_answer_keeps_no_reader_of_another_from_ending_its_lease(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_little_checkpoint(client, "demo")
    monkeypatch.setattr(checkpoint_files, "CLOSE_SECONDS", 0.01)
    silent, other = (HoldfastFileSystem(token=service.token(Scope.READ)) for _ in range(2))
    restores, go_on = silent._reader.parts.client.restores, threading.Event()
    release = restores.release

    def answered_late(lease_id: str) -> None:
        assert go_on.wait(300)
        release(lease_id)

    monkeypatch.setattr(restores, "release", answered_late)
    files = [fs.open(FILE) for fs in (silent, other)]
    assert len(leases(service)) == 2
    for file in files:
        file.close()
    until(lambda: len(leases(service)) == 1)
    go_on.set()
    until(lambda: not leases(service))


def test_a_read_that_fails_says_so_at_once_and_not_when_its_lease_is_ended(
    service: RunningService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_little_checkpoint(client, "demo")
    monkeypatch.setattr(checkpoint_files, "CLOSE_SECONDS", 0.01)
    fs = HoldfastFileSystem()
    file, go_on = fs.open(FILE), threading.Event()
    restores = fs._reader.parts.client.restores
    release = restores.release

    def away(*_: object) -> None:
        raise ServiceUnavailable("it does not answer")

    def answered_late(lease_id: str) -> None:
        assert go_on.wait(60), "the read has waited for the service"
        release(lease_id)

    monkeypatch.setattr(restores, "read_chunks", away)
    monkeypatch.setattr(restores, "release", answered_late)
    with pytest.raises(ServiceUnavailable, match="it does not answer"):
        file.read()
    assert len(leases(service)) == 1
    go_on.set()
    until(lambda: not leases(service))
    file.close()


def test_what_is_cold_is_a_folder_whose_files_must_be_thawed_and_hides_no_other(
    cold: Cold, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = cold.service
    service.make_project("demo")
    with Client(ClientSettings(url=service.url, token=service.token())) as connected:
        connected.projects.edit("demo", EditProject())
        for _ in range(3):
            save_little_checkpoint(connected, "demo")
    cold.policy(run=RUN)
    cold.advance(8 * DAY)
    cold.round()
    assert cold.tier(1, RUN) == "cold"
    fs = HoldfastFileSystem(service_url=service.url, token=service.token(Scope.READ))
    assert fs.ls(RUN, detail=False) == [f"{RUN}@3#3", f"{RUN}@2#2", f"{RUN}@1#1"]
    assert [path for path in fs.find(RUN) if path.endswith(".safetensors")] == [
        f"{RUN}@{n}#{n}/sample.safetensors" for n in (2, 3)
    ]
    assert f"{RUN}@1#1 has no files now" in caplog.text
    assert (fs.isdir(f"{RUN}@1"), fs.info(f"{RUN}@1")["step"]) == (True, 1)
    for asked in (lambda: fs.open(f"{RUN}@1/sample.safetensors"), lambda: fs.ls(f"{RUN}@1")):
        with pytest.raises(OSError, match=r"holdfast checkpoints thaw demo/doctor@1#1") as refused:
            asked()
        assert refused.value.errno == errno.ENODATA


def test_all_filesystems_of_a_process_keep_no_more_than_the_largest_of_them_may(
    service: RunningService, client: Client
) -> None:
    for _ in range(4):
        save_little_checkpoint(client, "demo")
    bounds = [SIZE_BYTES, 2 * SIZE_BYTES]
    filesystems = [HoldfastFileSystem(token=service.token(Scope.READ), cache_bytes=bound) for bound in bounds * 2]
    for fs in filesystems:
        for step in (1, 2, 3, 4):
            fs.cat_file(f"{RUN}@{step}/sample.safetensors")
    assert {fs._reader.parts.cache.kept_bytes for fs in filesystems} == {2 * SIZE_BYTES}
    filesystems[0].invalidate_cache()
    assert {fs._reader.parts.cache.kept_bytes for fs in filesystems} == {0}


@pytest.mark.usefixtures("client")
def test_a_mistyped_option_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'cache_byte' is no option of holdfast://"):
        fsspec.filesystem("holdfast", cache_byte=1)
    fsspec.filesystem("holdfast", use_listings_cache=False, skip_instance_cache=True)


@pytest.mark.rule("read-lease")
def test_a_checkpoint_is_not_deleted_under_a_reader_and_once_deleted_says_so(
    service: RunningService, client: Client, clock: Clock
) -> None:
    for _ in range(3):
        save_little_checkpoint(client, "demo")
    _, content = content_of(service, client, 1)
    fs = HoldfastFileSystem(cache_bytes=0)
    file, forgetful = fs.open(f"{RUN}@1/sample.safetensors"), fs.open(f"{RUN}@1/sample.safetensors")
    deleted = {"filter": {"before_step": 2}, "all_of_run": True, "reason": "a test"}

    def prune() -> dict[str, Any]:
        reply = service.http().post("/v1/projects/demo/runs/doctor/retention/prune", json=deleted)
        return answer(reply)  # type: ignore[no-any-return]

    assert [each["reasons"][0]["kind"] for each in prune()["left"]] == ["being_read"]
    clock.advance(2 * HOUR)  # nobody has read for longer than a lease
    assert [each["step"] for each in prune()["trashed"]] == [1]
    clock.advance(73 * HOUR)
    assert file.read()[-SIZE_BYTES:] == content, "what is in the trash is still there"
    purge(service)
    assert states(service)[1] == "trashed"
    file.seek(0)
    assert file.read()[-SIZE_BYTES:] == content
    clock.advance(73 * HOUR)
    purge(service)
    assert states(service)[1] != "trashed"
    with pytest.raises(ChunkGone, match=r"Step 1 was deleted, and so are its bytes. Read another checkpoint"):
        forgetful.read()
    assert not fs.exists(f"{RUN}@1/sample.safetensors")
    for each in (file, forgetful):
        each.close()


@pytest.mark.usefixtures("database_url")
@pytest.mark.parametrize("kind", ["service", "s3_service"])
def test_a_flipped_byte_is_refused_with_its_chunk_and_tensor(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: RunningService = request.getfixturevalue(kind)
    service.make_project("demo")
    with Client(ClientSettings(url=service.url, token=service.token())) as client:
        save_little_checkpoint(client, "demo")
        digest, content = content_of(service, client, 1)
    # Served by the service or by S3: a client that sees the mount would prove its file in the same way.
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    fs = HoldfastFileSystem(service_url=service.url, token=service.token(Scope.READ))
    assert isinstance(service.context.store, PosixStore) == (kind == "service")
    with fs.open(FILE) as file:
        file.seek(-SIZE_BYTES, 2)
        assert file.read() == content
        fs.invalidate_cache()
        flip(service.context.store, key_of(service, digest))
        file.seek(-1, 2)
        with pytest.raises(ChunkLost, match=rf"Chunk {digest[:12]} cannot be read with its right bytes.*sample/bytes"):
            file.read(1)
    assert not leases(service)


def test_threads_read_at_once_and_fetch_a_chunk_once(service: RunningService, client: Client) -> None:
    save_little_checkpoint(client, "demo")
    _, content = content_of(service, client, 1)
    fs = HoldfastFileSystem()
    together = threading.Barrier(8)

    def read(number: int) -> bytes:
        with fs.open(FILE) as file:
            together.wait(60)
            file.seek(number - SIZE_BYTES, 2)
            return file.read(1000)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read, range(8))) == [content[n : n + 1000] for n in range(8)]
    assert fs._reader.parts.cache.kept_bytes == SIZE_BYTES
    assert not leases(service)


def test_open_files_share_the_buffers_in_which_chunks_arrive(service: RunningService, client: Client) -> None:
    for _ in range(3):
        save_little_checkpoint(client, "demo")
    fs = HoldfastFileSystem()
    with ExitStack() as opened:
        for step in (1, 2, 3):
            opened.enter_context(fs.open(f"{RUN}@{step}/sample.safetensors")).read()
        assert [len(each) for each in fs._reader.parts.buffers._free.queue] == [SIZE_BYTES]


def _read_in_a_fork(file: HoldfastFile, results: Connection) -> None:
    file.seek(-SIZE_BYTES, 2)
    results.send((file.read(), file.fs.cat_file(FILE, -1)))
    file.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_process_goes_on_with_a_lease_of_its_own(service: RunningService, client: Client) -> None:
    save_little_checkpoint(client, "demo")
    _, content = content_of(service, client, 1)
    fs = HoldfastFileSystem()
    context = multiprocessing.get_context("fork")
    with fs.open(FILE) as file:
        file.read()
        [before] = leases(service)
        fs.invalidate_cache()  # the worker must fetch: its parent's threads are not there
        for _ in range(2):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_read_in_a_fork, args=(file, theirs), daemon=True)
            worker.start()
            try:
                assert ours.poll(60), "a worker waits for threads or locks of its parent"
                assert ours.recv() == (content, content[-1:])
                worker.join(60)
                assert worker.exitcode == 0
            finally:
                worker.kill()
        ended_or_left = [lease.id for lease in leases(service)]
        assert ended_or_left == [before.id], "a worker has ended its parent's lease, or left one"
        file.seek(-1, 2)
        assert file.read() == content[-1:]
    assert not leases(service)
