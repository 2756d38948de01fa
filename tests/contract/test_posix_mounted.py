"""posix, for a client that sees the mount and hands files over."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import resource
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from holdfast_service.stores.base import ObjectMismatch, ObjectMissing, StoreFull, StoreRefused, StoreUnavailable
from holdfast_service.stores.posix import files as posix_files
from holdfast_service.stores.posix import posix_store as posix
from holdfast_service.stores.registry import open_store
from tests.contract.backends import Backend
from tests.contract.posix_outage import unmounted
from tests.contract.suite import StoreContract
from tests.support.death import Killed, kill
from tests.support.stores import chunk_key, sha256


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    root = tmp_path_factory.mktemp("posix") / "store"
    store = open_store(f"posix://{root}", b"k" * 32)

    def hand_in(key, data):
        ticket_id = secrets.token_hex(16)
        store.incoming_path(ticket_id).write_bytes(data)
        store.publish(ticket_id, key, len(data))

    return Backend(
        store,
        hand_in,
        proves=True,
        reopen=lambda: open_store(f"posix://{root}", b"k" * 32),
        outage=lambda: unmounted(root),
    )


class TestStore(StoreContract):
    pass


def _handed_over(store, data: bytes) -> str:
    ticket_id = secrets.token_hex(16)
    store.incoming_path(ticket_id).write_bytes(data)
    store.incoming_path(ticket_id).chmod(0o600)  # as a client makes it, whatever this process's umask says
    return ticket_id


@pytest.fixture
def takes_files(backend):
    """Only where the tests' folder lies on a local filesystem does the service take a file without a copy."""
    probe = backend.store.root / "incoming" / "probe"
    probe.touch(0o600)
    with probe.open("rb") as file:
        taken = posix_files.exclude_writers(file.fileno())
    probe.unlink()
    if not taken:
        pytest.skip("the tests' folder is on no local filesystem: set TMPDIR to one on ext4, XFS or tmpfs")


@contextmanager
def _taken_or_copied(way: str, handed_over: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """The service copies a file that somebody has open to write."""
    if way == "taken":
        request.getfixturevalue("takes_files")
    with handed_over.open("r+b") if way == "copied" else nullcontext():
        yield


@pytest.mark.rule("drop-box")
def test_what_is_written_but_not_published_is_not_visible_and_is_swept(backend):
    store, key = backend.store, chunk_key(b"half")
    ticket_id = _handed_over(store, b"half")
    with pytest.raises(ObjectMissing):
        store.head(key)
    assert key not in {found.key for found in store.list_objects("p1")}
    store.sweep_incoming(older_than_seconds=3600)
    assert store.incoming_path(ticket_id).exists()
    os.utime(store.incoming_path(ticket_id), (0, 0))
    assert store.sweep_incoming(older_than_seconds=3600) >= 1
    assert not store.incoming_path(ticket_id).exists()


@pytest.mark.rule("drop-box")
def test_publishing_twice_is_fine_and_overwrites_nothing(backend):
    store, key = backend.store, chunk_key(b"first")
    ticket_id = _handed_over(store, b"first")
    for _ in range(2):
        store.publish(ticket_id, key, 5)
    store.publish(_handed_over(store, b"other"), key, 5)
    assert store.object_path(key).read_bytes() == b"first"
    assert list((store.root / "incoming").iterdir()) == []


@pytest.mark.rule("drop-box")
def test_a_file_that_is_not_seen_yet_is_missing_so_that_the_caller_can_ask_again(backend):
    store, key, ticket_id = backend.store, chunk_key(b"late"), secrets.token_hex(16)
    with pytest.raises(ObjectMissing):
        store.publish(ticket_id, key, 4)
    store.incoming_path(ticket_id).write_bytes(b"late")
    store.publish(ticket_id, key, 4)
    assert store.head(key).bytes == 4


@pytest.mark.parametrize("announced", [3, 5, 0])
def test_another_size_is_a_mismatch_and_the_file_is_gone(backend, announced):
    store, key = backend.store, chunk_key(b"four")
    ticket_id = _handed_over(store, b"four")
    with pytest.raises(ObjectMismatch):
        store.publish(ticket_id, key, announced)
    assert not store.incoming_path(ticket_id).exists()
    with pytest.raises(ObjectMissing):
        store.head(key)


@pytest.mark.rule("drop-box")
def test_links_and_pipes_cannot_pull_other_files_into_the_store(backend, tmp_path):
    store, key = backend.store, chunk_key(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    for make in (lambda path: path.symlink_to(tmp_path / "secret"), os.mkfifo, os.mkdir):
        ticket_id = secrets.token_hex(16)
        make(store.incoming_path(ticket_id))
        with pytest.raises(ObjectMismatch):
            store.publish(ticket_id, key, 6)
        with pytest.raises(ObjectMissing):
            store.head(key)


@pytest.mark.rule("drop-box")
def test_a_ticket_id_is_no_path(backend):
    for ticket_id in ("../../etc/passwd", "short", "a/b-c-d-e-f", ".hidden-file", "x" * 65):
        with pytest.raises(ValueError, match="ticket id"):
            backend.store.incoming_path(ticket_id)


@pytest.mark.rule("drop-box")
def test_only_who_reads_the_fresh_nonce_proves_the_mount(backend, monkeypatch):
    store = backend.store
    proof_id, path = store.new_mount_proof(expires_in_seconds=60)
    content = path.read_text()
    other_id, _ = store.new_mount_proof(expires_in_seconds=60)
    assert store.check_mount_proof(proof_id, content)
    assert not store.check_mount_proof(proof_id, content[:-1] + ("0" if content[-1] != "0" else "1"))
    assert not store.check_mount_proof(proof_id, "")
    assert not store.check_mount_proof(other_id, content)
    assert not store.check_mount_proof("f" * 32, content)
    assert not store.check_mount_proof("../incoming/x", content)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert not store.check_mount_proof(proof_id, content)
    store.sweep_incoming(older_than_seconds=3600)
    assert not path.exists()


def test_a_full_disk_is_named_and_leaves_nothing(backend):
    """The process's own file size limit stands for the disk: the write fails in the middle, in the same way."""
    store, key = backend.store, chunk_key(b"too much")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, hard))
    try:
        with pytest.raises(StoreFull, match="free some room"):
            store.put_bytes(key, bytes(2 * 1024 * 1024))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((store.root / "incoming").iterdir()) == []
    with pytest.raises(ObjectMissing):
        store.head(key)


@pytest.mark.rule("reuse-only-hashed")
def test_only_the_service_can_say_that_a_file_was_hashed(backend):
    store, key = backend.store, chunk_key(b"data")
    store.publish(_handed_over(store, b"data"), key, 4)
    assert store.head(key).sha256 == key.digest
    proof = store.object_path(key).with_name(key.generation + ".sha256")
    for torn in ("", key.digest[:20], key.digest.upper(), key.digest + "0"):
        proof.write_text(torn)
        assert store.head(key).sha256 is None
    assert [found.key for found in store.list_objects("p1")].count(key) == 1


def test_what_the_service_reads_comes_from_the_disk_and_not_from_the_kernels_memory(backend, monkeypatch):
    """Else a scrub finds a chunk good for weeks whose sector is dead."""
    store, key, real = backend.store, chunk_key(b"data"), os.posix_fadvise
    store.publish(_handed_over(store, b"data"), key, 4)
    advised = []

    def posix_fadvise(descriptor, start, length, advice):
        advised.append((os.readlink(f"/proc/self/fd/{descriptor}"), start, length, advice))
        real(descriptor, start, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    pieces = store.open_read(key)
    assert advised == [(str(store.object_path(key).resolve()), 0, 0, os.POSIX_FADV_DONTNEED)]
    assert b"".join(pieces) == b"data"


class _Calls:
    """What a store asks of the filesystem, in order. `names` says what stands behind a path's last part."""

    def __init__(self, monkeypatch, key, ticket_id) -> None:
        self.seen: list[str] = []
        self._names = {key.generation: "object", key.digest: "folder", ticket_id: "handed over"}
        real = {name: getattr(os, name) for name in ("fsync", "link", "unlink")}

        def fsync(descriptor):
            self.seen.append(f"fsync {self._name(os.readlink(f'/proc/self/fd/{descriptor}'))}")
            real["fsync"](descriptor)

        def link(source, target, **options):
            self.seen.append(f"link {self._name(source)} to {self._name(target)}")
            real["link"](source, target, **options)

        def unlink(path, **options):
            self.seen.append(f"unlink {self._name(path)}")
            real["unlink"](path, **options)

        for name, call in (("fsync", fsync), ("link", link), ("unlink", unlink)):
            monkeypatch.setattr(os, name, call)

    def _name(self, path) -> str:
        folder, _, last = str(path).rpartition("/")
        if folder == "/proc/self/fd":
            return "descriptor"
        return self._names.get(last, "part" if last.endswith(".part") else "above")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_hard_links_is_refused_and_not_waited_for(backend, monkeypatch, number):
    """Parallelstore and buckets behind FUSE have none, and kernels say so in these three ways."""

    def link(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreRefused, match="hard links"):
        backend.store.probe()
    assert list((backend.store.root / "incoming").iterdir()) == []


@pytest.mark.usefixtures("takes_files")
@pytest.mark.rule("durable-publish")
def test_a_file_that_only_the_service_can_change_becomes_the_object_without_a_copy(backend, monkeypatch):
    store, key = backend.store, chunk_key(b"weights")
    ticket_id = _handed_over(store, b"weights")
    handed_over = store.incoming_path(ticket_id)
    handed_over.chmod(0o604)
    os.utime(handed_over, (1, 1))
    inode = handed_over.stat().st_ino
    monkeypatch.delattr(os, "copy_file_range")
    store.publish(ticket_id, key, 7)
    published = store.object_path(key).stat()
    assert (published.st_ino, published.st_nlink, published.st_mode & 0o777) == (inode, 1, 0o600)
    assert time.time() - published.st_mtime < 3600, "it is as old as its publication"
    assert store.head(key).sha256 == sha256(b"weights")
    assert list((store.root / "incoming").iterdir()) == []


def _mapped(path) -> Callable[[], object]:
    """Without a descriptor, which Python's own mapping keeps."""
    libc, size = ctypes.CDLL(None), path.stat().st_size
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with path.open("r+b") as file:
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
    assert address != ctypes.c_void_p(-1).value
    return functools.partial(libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size))


@pytest.mark.rule("durable-publish")
@pytest.mark.parametrize(
    "why", ["mapped", "named twice", "another user's", "open to a group", "on a network filesystem", "without /proc"]
)
def test_a_file_that_somebody_else_could_change_is_copied(backend, monkeypatch, tmp_path_factory, why):
    """One that is open to write is below."""
    data = f"weights {why}".encode()
    store, key, link = backend.store, chunk_key(data), os.link
    ticket_id = _handed_over(store, data)
    handed_over = store.incoming_path(ticket_id)
    inode = handed_over.stat().st_ino

    def no_proc(source, *args, **options):
        if str(source).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        link(source, *args, **options)

    with ExitStack() as stack:
        if why == "mapped":
            stack.callback(_mapped(handed_over))
        elif why == "named twice":
            os.link(handed_over, store.root / "mine")
            stack.callback(os.unlink, store.root / "mine")
        elif why == "another user's":
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        elif why == "open to a group":
            handed_over.chmod(0o660)
        elif why == "on a network filesystem":
            monkeypatch.setattr(posix_files, "LOCAL_FILESYSTEMS", frozenset())
        else:
            monkeypatch.setattr(os, "link", no_proc)
        store.publish(ticket_id, key, len(data))
    assert store.object_path(key).stat().st_ino != inode
    assert store.object_path(key).read_bytes() == data
    assert list((store.root / "incoming").iterdir()) == []


@pytest.mark.rule("durable-publish")
def test_a_file_that_another_process_gave_up_meanwhile_is_copied(backend, monkeypatch):
    """That one was told that the bytes did not reach the disk, and removes the client's name. Nobody tells this one."""
    store, key, exclude = backend.store, chunk_key(b"weights"), posix_files.exclude_writers
    ticket_id = _handed_over(store, b"weights")
    inode = store.incoming_path(ticket_id).stat().st_ino

    def given_up_behind_the_look(descriptor):
        excluded = exclude(descriptor)
        store.incoming_path(ticket_id).rename(store.root / "incoming" / "another.part")
        return excluded

    monkeypatch.setattr(posix, "exclude_writers", given_up_behind_the_look)
    store.publish(ticket_id, key, 7)
    assert store.object_path(key).stat().st_ino != inode
    assert store.object_path(key).read_bytes() == b"weights"
    store.sweep_incoming(older_than_seconds=-1)


@pytest.mark.usefixtures("takes_files")
@pytest.mark.rule("durable-publish")
def test_the_kernels_list_of_mounts_may_hold_any_bytes_and_may_be_absent(backend, monkeypatch, tmp_path):
    file, mounts = tmp_path / "chunk", tmp_path / "mountinfo"
    file.touch(0o600)
    device = file.stat().st_dev
    odd = b"36 35 0:99 / /mnt/\xff\x0c\xe2\x80\xa8 rw,noatime shared:1 master:2 - fuse.sshfs host rw\n"
    mine = f"37 35 {os.major(device)}:{os.minor(device)} / / rw shared:1 propagate_from:2 - ext4 /dev/vda rw\n".encode()
    monkeypatch.setattr(posix_files, "MOUNTS", mounts)
    with file.open("rb") as opened:
        assert not posix_files.exclude_writers(opened.fileno())
        mounts.write_bytes(odd + mine.replace(b" ext4 ", b" 9p "))
        assert not posix_files.exclude_writers(opened.fileno())
        mounts.write_bytes(odd + mine)
        assert posix_files.exclude_writers(opened.fileno())


@pytest.mark.usefixtures("takes_files")
@pytest.mark.rule("durable-publish")
def test_who_opens_the_file_to_write_while_the_service_hashes_it_gets_no_object_of_it(backend, monkeypatch):
    store, key, readv = backend.store, chunk_key(b"weights"), os.readv
    ticket_id = _handed_over(store, b"weights")

    def opened_behind_the_hash(descriptor, buffers):
        if not (count := readv(descriptor, buffers)):
            with pytest.raises(BlockingIOError):  # without O_NONBLOCK it would wait for the service
                os.open(store.incoming_path(ticket_id), os.O_WRONLY | os.O_NONBLOCK)
        return count

    monkeypatch.setattr(os, "readv", opened_behind_the_hash)
    with pytest.raises(ObjectMismatch, match="opened to write"):
        store.publish(ticket_id, key, 7)
    with pytest.raises(ObjectMissing):
        store.head(key)
    assert list((store.root / "incoming").iterdir()) == [], "the client sends it again"


@pytest.mark.usefixtures("takes_files")
@pytest.mark.rule("durable-publish")
def test_a_file_whose_bytes_did_not_reach_the_disk_is_not_taken_at_the_next_try(backend, monkeypatch):
    """The kernel says so once. Its memory still has the right bytes."""
    store, key = backend.store, chunk_key(b"weights")
    ticket_id = _handed_over(store, b"weights")

    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreUnavailable):
            store.publish(ticket_id, key, 7)
    with pytest.raises(ObjectMissing):
        store.publish(ticket_id, key, 7)


@pytest.mark.rule("durable-publish")
@pytest.mark.parametrize("kernel", ["copies", "refuses", "stops"])
def test_who_keeps_the_file_open_that_it_handed_over_cannot_change_the_object(backend, monkeypatch, kernel):
    """Whether the kernel copies, the filesystem cannot, or it says in the middle that there is no more."""
    real, data = os.copy_file_range, secrets.token_bytes(3 * 1024 * 1024 + 7)
    asked = []

    def copy_file_range(source, target, count):
        asked.append(count)
        if kernel == "refuses":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return 0 if kernel == "stops" and len(asked) % 2 else real(source, target, min(count, 1024 * 1024 + 1))

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    store, key = backend.store, chunk_key(data)
    ticket_id = _handed_over(store, data)
    with store.incoming_path(ticket_id).open("r+b") as mine:
        store.publish(ticket_id, key, len(data))
        mine.write(bytes([data[0] ^ 1]))
        mine.flush()
        os.fsync(mine.fileno())
        assert sha256(store.object_path(key).read_bytes()) == key.digest
    assert store.head(key).sha256 == key.digest
    assert asked


@pytest.mark.rule("durable-publish")
def test_what_is_hashed_is_what_was_kept_of_a_file_that_changes_meanwhile(backend, monkeypatch):
    store, key, real = backend.store, chunk_key(b"weights"), os.copy_file_range
    ticket_id = _handed_over(store, b"weights")

    def changed_behind_the_copy(source, target, count):
        copied = real(source, target, count)
        store.incoming_path(ticket_id).write_bytes(b"WEIGHTS")
        return copied

    monkeypatch.setattr(os, "copy_file_range", changed_behind_the_copy)
    with store.incoming_path(ticket_id).open("r+b"):
        store.publish(ticket_id, key, 7)
    assert store.object_path(key).read_bytes() == b"weights"
    assert store.head(key).sha256 == sha256(b"weights")


@pytest.mark.rule("durable-publish")
@pytest.mark.parametrize("way", ["taken", "copied"])
def test_a_file_that_is_cut_meanwhile_is_no_object(backend, monkeypatch, request, way):
    store, key, real = backend.store, chunk_key(b"weights"), os.fstat
    ticket_id = _handed_over(store, b"weights")

    def cut_behind_the_look(descriptor):
        facts = real(descriptor)
        patch.undo()  # only behind the first look: later it would wait for the service's lease
        os.truncate(store.incoming_path(ticket_id), 3)
        return facts

    with monkeypatch.context() as patch, _taken_or_copied(way, store.incoming_path(ticket_id), request):
        patch.setattr(posix.os, "fstat", cut_behind_the_look)
        with pytest.raises(ObjectMismatch, match="was cut"):
            store.publish(ticket_id, key, 7)
    with pytest.raises(ObjectMissing):
        store.head(key)


@pytest.mark.rule("durable-publish")
@pytest.mark.parametrize("way", ["taken", "copied"])
def test_bytes_then_name_then_proof_and_only_then_the_handed_over_file_goes(backend, monkeypatch, request, way):
    store, key = backend.store, chunk_key(b"weights")
    ticket_id = _handed_over(store, b"weights")
    with _taken_or_copied(way, store.incoming_path(ticket_id), request):
        calls = _Calls(monkeypatch, key, ticket_id)
        store.publish(ticket_id, key, 7)
    first = ["link descriptor to part", "fsync handed over"] if way == "taken" else ["fsync part"]
    assert [each for each in calls.seen if each != "fsync above"] == [
        *first,
        "link part to object",
        "fsync folder",
        "unlink part",
        "unlink handed over",
    ]


@pytest.mark.rule("durable-publish")
@pytest.mark.parametrize("way", ["taken", "copied", "sent"])
def test_a_service_that_died_behind_the_link_leaves_the_name_to_the_next_one_to_make_durable(
    backend, monkeypatch, request, way
):
    store, key = backend.store, chunk_key(b"weights")
    with monkeypatch.context() as patch:
        # A file that is taken has a second name of the service's before it has the object's.
        kill(patch, posix_files.os, "link", after=True, at=2 if way == "taken" else 1)
        ticket_id = _handed_over(store, b"weights")
        with _taken_or_copied(way, store.incoming_path(ticket_id), request), pytest.raises(Killed):
            store.put_bytes(key, b"weights") if way == "sent" else store.publish(ticket_id, key, 7)
    assert store.head(key).sha256 is None  # it is there, and neither proven nor durable
    calls = _Calls(monkeypatch, key, ticket_id)
    backend.reopen().publish(ticket_id, key, 7)
    assert calls.seen[0] == "fsync folder"
    assert not store.incoming_path(ticket_id).exists()
    assert store.object_path(key).read_bytes() == b"weights"


@pytest.mark.usefixtures("takes_files")
@pytest.mark.rule("durable-publish")
def test_a_service_that_died_behind_its_second_name_for_a_file_leaves_the_file_to_the_next_one(backend, monkeypatch):
    store, key = backend.store, chunk_key(b"weights")
    ticket_id = _handed_over(store, b"weights")
    with monkeypatch.context() as patch:
        kill(patch, posix_files.os, "link", after=True)
        with pytest.raises(Killed):
            store.publish(ticket_id, key, 7)
    backend.reopen().publish(ticket_id, key, 7)
    assert store.head(key).sha256 == sha256(b"weights")
    store.sweep_incoming(older_than_seconds=-1)
    assert list((store.root / "incoming").iterdir()) == []
    assert store.object_path(key).read_bytes() == b"weights"
