"""The folder of chunks on a host: real processes at once, kill -9, torn files, flipped bits, limits, holds."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import threading
from types import SimpleNamespace

import pytest

from holdfast_client import errors
from holdfast_client.local import chunk_folder as chunk_folder_module
from holdfast_client.local import room as room_module
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.local.room import INCOMING, Room
from holdfast_client.local.tier import LocalTier

spawn = multiprocessing.get_context("spawn")


def chunk(number: int, size: int = 1000) -> tuple[str, bytes]:
    body = bytes([number % 256]) * size
    return hashlib.sha256(body).hexdigest(), body


def read(folder: ChunkFolder, digest: str, size: int = 1000) -> bytes | None:
    buffer = bytearray(size)
    return bytes(buffer) if folder.read_into(digest, memoryview(buffer)) else None


def file_of(folder: ChunkFolder, digest: str):
    return folder.path / digest[:2] / digest


@pytest.fixture
def folder(tmp_path):
    made = ChunkFolder(tmp_path / "chunks", limit_bytes=100_000)
    yield made
    made.close()


@pytest.fixture
def processes():
    """Starts processes that run `function(*args)`; none outlives the test."""
    started = []

    def start(function, *args):
        process = spawn.Process(target=function, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_added_is_read_back_and_a_second_add_is_fine(folder, durable):
    digest, body = chunk(1)
    assert read(folder, digest) is None
    assert folder.size(digest) is None
    assert folder.add(digest, body, durable=durable)
    assert folder.add(digest, body, durable=durable)
    assert read(folder, digest) == body
    assert folder.size(digest) == len(body)
    assert list((folder.path / INCOMING).iterdir()) == []


def test_an_empty_chunk_is_a_chunk(folder):
    digest, body = chunk(0, 0)
    assert folder.add(digest, body, durable=False)
    assert read(folder, digest, 0) == b""


def test_the_folder_is_this_users_alone_and_one_that_others_write_is_refused(folder, tmp_path):
    folder.add(*chunk(1), durable=False)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert file_of(folder, chunk(1)[0]).parent.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(errors.ConfigurationError, match="chmod 700"):
        ChunkFolder(shared, limit_bytes=1000)


def test_no_name_leads_out_of_the_folder(folder, tmp_path):
    digest, body = chunk(1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / digest).write_bytes(body)
    file_of(folder, digest).parent.symlink_to(outside)
    assert read(folder, digest) is None
    with pytest.raises(OSError):
        folder.add(digest, body, durable=False)
    other, _ = chunk(2)
    file_of(folder, other).parent.mkdir(exist_ok=True)
    file_of(folder, other).symlink_to(outside / digest)
    assert read(folder, other) is None
    for name in ("../x", "x", digest.upper(), digest + "\n"):
        with pytest.raises(ValueError):
            folder.size(name)
        with pytest.raises(ValueError):
            folder.hold("../x")


def test_a_flipped_bit_is_never_handed_out_and_the_file_goes(folder):
    digest, body = chunk(1)
    folder.add(digest, body, durable=False)
    file_of(folder, digest).write_bytes(body[:-1] + b"x")
    assert read(folder, digest) is None
    assert not file_of(folder, digest).exists()
    assert folder.add(digest, body, durable=False)
    assert read(folder, digest) == body


def test_bytes_that_are_read_wrong_once_condemn_no_file(folder, monkeypatch):
    digest, body = chunk(1)
    folder.add(digest, body, durable=True)
    read_once, found = chunk_folder_module._read, []

    def flips_a_bit_at_first(descriptor, buffer, stop):
        found.append(read_once(descriptor, buffer, stop))
        if len(found) > 1:
            return found[-1]
        buffer[0] ^= 1
        return hashlib.sha256(buffer).hexdigest()

    monkeypatch.setattr(chunk_folder_module, "_read", flips_a_bit_at_first)
    assert read(folder, digest) == body
    assert found == [digest, digest]


def test_a_chunk_that_the_disk_gives_back_no_more_is_written_anew(folder, monkeypatch):
    """Else all later saves that share it would lie in the spool as badly as the first."""
    digest, body = chunk(1)
    folder.add(digest, body, durable=True)
    bad = file_of(folder, digest).stat().st_ino
    for name in ("_read", "_digest_of"):
        well = getattr(chunk_folder_module, name)

        def fails_on_the_bad_one(descriptor, *rest, well=well):
            if os.fstat(descriptor).st_ino == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return well(descriptor, *rest)

        monkeypatch.setattr(chunk_folder_module, name, fails_on_the_bad_one)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        read(folder, digest)
    assert folder.add(digest, body, durable=True)
    assert read(folder, digest) == body


def test_a_cut_file_goes_and_a_wrong_question_removes_nothing(folder):
    digest, body = chunk(1)
    folder.add(digest, body, durable=False)
    assert read(folder, digest, len(body) + 1) is None
    assert read(folder, digest) == body
    file_of(folder, digest).write_bytes(body[:-1])
    assert read(folder, digest) is None
    assert not file_of(folder, digest).exists()


def test_a_durable_add_does_not_believe_the_size_of_what_another_process_left(folder):
    digest, body = chunk(1)
    file_of(folder, digest).parent.mkdir(mode=0o700)
    file_of(folder, digest).write_bytes(bytes(len(body)))
    assert folder.add(digest, body, durable=True)
    assert file_of(folder, digest).read_bytes() == body


@pytest.mark.parametrize("another_was_faster", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_the_disk_did_not_take_is_written_anew_and_not_believed_at_the_next_save(
    folder, monkeypatch, number, another_was_faster
):
    """The kernel tells it once, and keeps the right bytes in memory: a second fsync of that file says nothing."""
    digest, body = chunk(1)
    assert folder.add(digest, body, durable=False), "a restore left it"
    real, synced = os.fsync, []

    def fsync(descriptor):
        inode = os.fstat(descriptor).st_ino
        synced.append(inode)
        if inode == lost and synced.count(lost) == 1:
            if another_was_faster:
                file_of(folder, digest).unlink()
            raise OSError(number, os.strerror(number))
        real(descriptor)

    with file_of(folder, digest).open("rb") as kept:  # its inode's number is not free then
        lost = os.fstat(kept.fileno()).st_ino
        monkeypatch.setattr(os, "fsync", fsync)
        assert folder.add(digest, body, durable=True)
        inode = file_of(folder, digest).stat().st_ino
        assert inode != lost
        assert inode in synced
    assert read(folder, digest) == body


def test_only_what_was_synced_or_read_back_from_the_disk_is_remembered_as_proven(folder):
    digest, body = chunk(1)
    assert folder.add(digest, body, durable=False)
    assert read(folder, digest) == body
    with file_of(folder, digest).open("r+b") as file:  # as a disk that lost the bytes and said so to nobody
        file.write(b"x")
    assert folder.add(digest, body, durable=True)
    assert file_of(folder, digest).read_bytes() == body


def test_a_restores_copy_does_not_replace_a_durable_one_that_came_meanwhile(folder, monkeypatch):
    digest, body = chunk(1)
    publish = Room.publish

    def behind_a_save(room, slot, digest, *, durable):
        if not durable:
            assert folder.add(digest, body, durable=True)
            kept.append(file_of(folder, digest).stat().st_ino)
        publish(room, slot, digest, durable=durable)

    kept: list[int] = []
    monkeypatch.setattr(Room, "publish", behind_a_save)
    assert folder.add(digest, body, durable=False)
    assert [file_of(folder, digest).stat().st_ino] == kept
    assert list((folder.path / INCOMING).iterdir()) == []
    with folder._room.locked() as ledger:
        assert ledger.used == len(body)


def test_what_a_process_remembers_of_its_chunks_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(chunk_folder_module, "_MOST_PROVEN", 3)
    for number in range(6):
        assert folder.add(*chunk(number), durable=True)
    assert list(folder._proven) == [chunk(number)[0] for number in (3, 4, 5)]
    assert folder.add(*chunk(0), durable=True), "it is read again, and that is all"


def test_torn_files_of_dead_writers_are_swept_and_those_of_living_ones_stay(folder):
    incoming = folder.path / INCOMING
    folder.add(*chunk(1), durable=False)
    (incoming / "dead").write_bytes(b"torn")
    with (incoming / "living").open("wb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        again = ChunkFolder(folder.path, limit_bytes=100_000)
        assert [path.name for path in incoming.iterdir()] == ["living"]
        again.close()


def test_a_hold_is_made_durable_while_others_use_the_folder(folder, monkeypatch):
    synced = []

    def fsync(descriptor):
        folder.hold("other").add([chunk(2)[0]])
        synced.append(descriptor)

    monkeypatch.setattr(room_module, "_LOCK_SECONDS", 0)
    monkeypatch.setattr("os.fsync", fsync)
    folder.hold("save").add([chunk(1)[0]], durable=True)
    assert len(synced) == 3
    assert folder.hold("save").digests() == {chunk(1)[0]}


def test_the_oldest_use_goes_first_and_reading_is_a_use(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks", limit_bytes=3_000)
    made = [chunk(number) for number in range(4)]
    for at, (digest, body) in enumerate(made[:3]):
        assert folder.add(digest, body, durable=False)
        os.utime(file_of(folder, digest), (at, at))
    assert read(folder, made[0][0]) == made[0][1]
    assert folder.add(*made[3], durable=False)
    # A sixteenth of the limit is freed beyond what is needed, which is one more chunk here.
    assert [folder.size(digest) for digest, _ in made] == [1000, None, None, 1000]
    folder.close()


def test_without_a_limit_the_folder_leaves_to_others_what_they_have_on_the_disk(folder, monkeypatch):
    folder.add(*chunk(1), durable=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1_000_000, free=9_000))
    tier = LocalTier(folder.path, None)
    assert tier.folder.limit_bytes == 9_000
    tier.close()


def test_what_is_larger_than_the_limit_is_refused_and_evicts_nothing_that_is_held(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks", limit_bytes=2_500)
    held, other = chunk(1), chunk(2)
    folder.hold("save").add([held[0]])
    assert folder.add(*held, durable=False)
    assert folder.add(*other, durable=False)
    assert not folder.add(*chunk(3, 2_000), durable=False)
    assert not folder.add(*chunk(4, 3_000), durable=False)
    assert list((folder.path / INCOMING).iterdir()) == []
    assert read(folder, held[0]) == held[1]
    folder.hold("save").release()
    assert folder.add(*chunk(3, 2_000), durable=False)
    folder.close()


def test_what_cannot_be_read_among_the_holds_stops_eviction(folder):
    (held, body), other = chunk(1, 60_000), chunk(2, 60_000)
    folder.add(held, body, durable=True)
    folder.hold("save").add([held])
    (folder.path / "holds" / "aside").mkdir()
    with pytest.raises(OSError, match="no regular file"):
        folder.add(*other, durable=True)
    assert read(folder, held, 60_000) == body


def test_holds_are_named_survive_their_process_and_forgive_a_torn_line(folder):
    first, second = chunk(1)[0], chunk(2)[0]
    folder.hold("step-1").add([first], durable=True)
    with (folder.path / "holds" / "step-1").open("ab") as file:
        file.write(second[:20].encode())
    again = ChunkFolder(folder.path, limit_bytes=100_000)
    assert again.holds() == ["step-1"]
    assert again.hold("step-1").digests() == {first}
    again.hold("step-1").add([second])
    assert again.hold("step-1").digests() == {first, second}
    again.hold("step-1").release()
    again.hold("step-1").release()
    assert again.holds() == []
    assert again.hold("step-1").digests() == set()
    again.close()


def _add_many(path, start, stop):
    folder = ChunkFolder(path, limit_bytes=20_000)
    for number in range(start, stop):
        assert folder.add(*chunk(number), durable=False)


def test_processes_at_once_keep_the_limit_and_what_is_held(tmp_path, processes):
    path = tmp_path / "chunks"
    folder = ChunkFolder(path, limit_bytes=20_000)
    held = [chunk(number) for number in range(200, 206)]
    folder.hold("mine").add(digest for digest, _ in held)
    writers = [processes(_add_many, path, start, start + 60) for start in (0, 30, 60)]
    for digest, body in held:
        assert folder.add(digest, body, durable=False)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert [read(folder, digest) for digest, _ in held] == [body for _, body in held]
    stored = list(path.glob("[0-9a-f][0-9a-f]/*"))
    assert sum(file.stat().st_size for file in stored) <= 20_000
    with folder._room.locked() as ledger:
        assert ledger.used == sum(file.stat().st_size for file in stored), "the ledger has not drifted"
    assert list((path / INCOMING).iterdir()) == []
    folder.close()


def test_a_hold_is_taken_before_the_look_so_no_eviction_comes_between(tmp_path):
    """An evictor that already has the lock goes first, whole; a hold that was taken before it is seen by it."""
    path = tmp_path / "chunks"
    folder, evictor = ChunkFolder(path, limit_bytes=1_500), ChunkFolder(path, limit_bytes=1_500)
    kept = chunk(1)
    folder.add(*kept, durable=False)
    took = threading.Event()

    def hold():
        folder.hold("late").add([kept[0]])
        took.set()

    with evictor._room.locked():
        holder = threading.Thread(target=hold)
        holder.start()
        assert not took.wait(0.2), "a hold waits for the eviction that is under way"
    holder.join(30)
    assert not evictor.add(*chunk(2), durable=False)
    assert read(folder, kept[0]) == kept[1]
    folder.close()
    evictor.close()


def _fetch_and_hang(path, digest, ready):
    folder = ChunkFolder(path, limit_bytes=100_000)
    with folder.fetching(digest, wait_seconds=0):
        ready.send(os.getpid())
        threading.Event().wait()


def test_a_fetching_process_that_is_killed_lets_the_others_go_on(folder, processes):
    digest, body = chunk(1)
    ours, theirs = spawn.Pipe(duplex=False)
    dead = processes(_fetch_and_hang, folder.path, digest, theirs)
    assert ours.recv() == dead.pid
    waiting = threading.Event()
    got = []

    def fetch():
        waiting.set()
        with folder.fetching(digest, wait_seconds=60) as alone:
            got.append(alone)
            folder.add(digest, body, durable=False)

    waiter = threading.Thread(target=fetch)
    waiter.start()
    assert waiting.wait(30)
    assert got == []
    dead.kill()
    waiter.join(30)
    assert got == [True]
    assert read(folder, digest) == body
    assert list((folder.path / "fetching").iterdir()) == []


def _fetch_once(path, digest, body, begin, counter):
    folder = ChunkFolder(path, limit_bytes=100_000)
    begin.wait()
    with folder.fetching(digest, wait_seconds=60) as alone:
        assert alone
        buffer = bytearray(len(body))
        if not folder.read_into(digest, memoryview(buffer)):
            with counter.get_lock():
                counter.value += 1
            assert folder.add(digest, body, durable=False)


def test_of_several_processes_one_fetches(folder, processes):
    digest, body = chunk(1)
    counter, begin = spawn.Value("i", 0), spawn.Barrier(4)
    fetching = [processes(_fetch_once, folder.path, digest, body, begin, counter) for _ in range(4)]
    for process in fetching:
        process.join(60)
        assert process.exitcode == 0
    assert counter.value == 1


def test_a_wait_for_another_fetch_is_bounded_and_can_be_stopped(folder):
    digest, _ = chunk(1)
    stop = threading.Event()
    with folder.fetching(digest, wait_seconds=0) as first:
        assert first
        with folder.fetching(digest, wait_seconds=0.05) as second:
            assert not second
        stop.set()
        with pytest.raises(errors.TransferStopped):
            with folder.fetching(digest, wait_seconds=60, stop=stop):
                pytest.fail("the lock is another's")


def test_lock_files_of_dead_processes_are_swept(folder, processes):
    digest, _ = chunk(1)
    ours, theirs = spawn.Pipe(duplex=False)
    dead = processes(_fetch_and_hang, folder.path, digest, theirs)
    ours.recv()
    ChunkFolder(folder.path, limit_bytes=100_000).close()
    assert [path.name for path in (folder.path / "fetching").iterdir()] == [digest], "its process lives"
    dead.kill()
    dead.join()
    ChunkFolder(folder.path, limit_bytes=100_000).close()
    assert list((folder.path / "fetching").iterdir()) == []


def _die_while_writing(path, ready):
    folder = ChunkFolder(path, limit_bytes=100_000)
    folder._room.reserve(50_000)
    ready.send(None)
    threading.Event().wait()


def test_room_that_a_killed_writer_had_reserved_comes_back(tmp_path, processes):
    path = tmp_path / "chunks"
    ours, theirs = spawn.Pipe(duplex=False)
    writer = processes(_die_while_writing, path, theirs)
    ours.recv()
    folder = ChunkFolder(path, limit_bytes=100_000)
    assert not folder.add(*chunk(1, 60_000), durable=False)
    folder.close()
    writer.kill()
    writer.join()
    folder = ChunkFolder(path, limit_bytes=100_000)
    assert folder.add(*chunk(1, 60_000), durable=False)
    folder.close()


def test_a_full_disk_evicts_once_and_then_refuses(folder, monkeypatch):
    """The disk, not the limit: what may go makes room, and where nothing may go the answer is no."""
    old, new = chunk(1), chunk(2)
    folder.add(*old, durable=False)
    real = os.pwrite

    def pwrite(descriptor, body, offset):
        full = file_of(folder, old[0]).exists() and len(body) >= 1000
        if full:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, body, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert folder.add(*new, durable=False)
    assert read(folder, old[0]) is None
    monkeypatch.undo()
    folder.hold("both").add([old[0], new[0]])
    folder.add(*old, durable=False)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not folder.add(*chunk(3), durable=False)
    assert list((folder.path / INCOMING).iterdir()) == []
    assert read(folder, new[0]) == new[1]


def test_a_folder_that_stays_locked_fails_the_call_and_hangs_nobody(folder, monkeypatch):
    monkeypatch.setattr(room_module, "_LOCK_SECONDS", 0.05)
    other = Room(folder._root, 1)
    with other.locked(), pytest.raises(TimeoutError):
        folder.add(*chunk(1), durable=False)
