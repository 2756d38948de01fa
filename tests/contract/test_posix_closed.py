"""A posix store follows no symbolic link inside itself, and only its owner, or a group that is named, can enter it."""

from __future__ import annotations

import os
import stat

import pytest

from holdfast_client.chunks.connections import RateLimit
from holdfast_client.chunks.transfer import write_incoming
from holdfast_client.chunks.workers import CoreLimit
from holdfast_service.stores.base import ObjectKey, StoreError, StoreRefused
from holdfast_service.stores.registry import open_store
from tests.support.object_server import object_server
from tests.support.stores import chunk_key, fetch, put_ticket, send

_KEY = b"k" * 32
_SECRET = b"what lies outside of the store"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root):
    return open_store(f"posix://{root}", _KEY)


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def _mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def _linked_folder(store, outside, key: ObjectKey, level: int) -> None:
    """One of the folders above the object is a link to a folder outside, which holds such an object."""
    below = "/".join(key.path.split("/")[level:])
    (outside / below).parent.mkdir(parents=True, exist_ok=True)
    (outside / below).write_bytes(_SECRET)
    link = store.root / "/".join(key.path.split("/")[:level])
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)


@pytest.mark.rule("no-symlinks")
@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_no_folder_of_a_store_is_looked_for_behind_a_symbolic_link(store, outside, level):
    key = chunk_key(_SECRET)
    _linked_folder(store, outside, key, level)
    before = sorted(outside.rglob("*"))
    for use in (
        lambda: store.head(key),
        lambda: list(store.open_read(key)),
        lambda: list(store.list_objects(key.project_id)),
        lambda: store.delete(key),
        lambda: store.put_bytes(chunk_key(b"new") if level < 3 else key, b"new"),
    ):
        with pytest.raises(StoreRefused, match="symbolic link"):
            use()
    assert sorted(outside.rglob("*")) == before
    assert next(path for path in before if path.is_file()).read_bytes() == _SECRET


@pytest.mark.rule("no-symlinks")
def test_an_object_that_is_a_symbolic_link_is_neither_read_nor_served(root, store, outside, tmp_path):
    (outside / "secret").write_bytes(_SECRET)
    key = chunk_key(_SECRET)
    store.put_bytes(key, _SECRET)
    store.object_path(key).unlink()
    store.object_path(key).symlink_to(outside / "secret")
    for use in (
        lambda: store.head(key),
        lambda: list(store.open_read(key)),
        lambda: list(store.list_objects(key.project_id)),
    ):
        with pytest.raises(StoreRefused, match="symbolic link"):
            use()
    with object_server(root, _KEY, tmp_path / "server.log") as server:
        answer = fetch(server.url, store.presign_get(key, expires_in_seconds=60))
        assert answer.status >= 400
        assert _SECRET not in answer.data
    store.delete(key)  # the link itself goes
    assert (outside / "secret").read_bytes() == _SECRET


@pytest.mark.rule("no-symlinks")
def test_records_and_staging_do_not_leave_the_store_by_a_symbolic_link(store, outside):
    store.write_named("p1/manifests/c1.json", b"{}")
    (outside / "c1.json").write_bytes(_SECRET)
    folder = store.root / "p1" / "manifests"
    (folder / "c1.json").unlink()
    folder.rmdir()
    folder.symlink_to(outside)
    for use in (
        lambda: store.read_named("p1/manifests/c1.json"),
        lambda: store.write_named("p1/manifests/c2.json", b"{}"),
        lambda: store.delete_named("p1/manifests/c1.json"),
        lambda: list(store.list_named("p1")),
    ):
        with pytest.raises(StoreRefused, match="symbolic link"):
            use()
    assert [path.name for path in outside.iterdir()] == ["c1.json"]
    for name in ("incoming", "proofs"):
        (store.root / name).rmdir()
        (store.root / name).symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        store.stage()
    with pytest.raises(StoreError, match="symbolic link"):
        store.new_mount_proof(expires_in_seconds=60)
    with pytest.raises(StoreError, match="symbolic link"):
        store.ping()
    assert [path.name for path in outside.iterdir()] == ["c1.json"]


def test_the_store_itself_may_be_reached_by_a_symbolic_link(root, store, tmp_path):
    (tmp_path / "name").symlink_to(root)
    by_link, key = open_store(f"posix://{tmp_path / 'name'}", _KEY), chunk_key(b"data")
    by_link.put_bytes(key, b"data")
    assert store.head(key) == by_link.head(key)


@pytest.mark.rule("no-symlinks")
def test_what_the_service_makes_is_for_its_owner_alone_whatever_the_umask(root, tmp_path):
    before = os.umask(0)
    try:
        store, key = open_store(f"posix://{root}", _KEY), chunk_key(b"data")
        with object_server(root, _KEY, tmp_path / "server.log") as server:
            assert send(server.url, put_ticket(store, key, b"data"), b"data").status == 201
        store.write_named("p1/manifests/c1.json", b"{}")
        store.new_mount_proof(expires_in_seconds=60)
        path = store.incoming_path("0123456789abcdef")
        write_incoming(str(path), memoryview(b"handed over"), RateLimit(), CoreLimit(1))
    finally:
        os.umask(before)
    for each in (root, *root.rglob("*")):
        assert _mode(each) == (0o700 if each.is_dir() else 0o600), each


@pytest.mark.rule("no-symlinks")
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o750])
def test_a_store_that_others_can_enter_is_closed_when_it_is_opened_and_when_it_is_asked(root, store, mode):
    root.chmod(mode)
    again = open_store(f"posix://{root}", _KEY)
    assert _mode(root) == 0o700
    root.chmod(mode)
    again.ping()
    assert _mode(root) == 0o700


@pytest.mark.rule("no-symlinks")
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_folder_that_is_not_ours_alone_is_refused_with_the_command_and_left_as_it_is(tmp_path, mode):
    home = tmp_path / "home"
    home.mkdir()
    (home / "other people's").mkdir()
    home.chmod(mode)
    with pytest.raises(StoreRefused, match=f"chmod o-rwx {home}"):
        open_store(f"posix://{home}", _KEY)
    assert _mode(home) == mode
    store = open_store(f"posix://{home / 'inner'}", _KEY)
    assert _mode(store.root) == 0o700


@pytest.mark.rule("no-symlinks")
def test_a_store_of_a_group_is_open_to_that_group_and_nobody_else(root):
    gid = os.getegid() or 12345  # root may give files to any group
    before = os.umask(0o077)
    try:
        store, key = open_store(f"posix://{root}", _KEY, group=gid), chunk_key(b"data")
        store.put_bytes(key, b"data")
        store.new_mount_proof(expires_in_seconds=60)
        path = store.incoming_path("0123456789abcdef")
        write_incoming(str(path), memoryview(b"handed over"), RateLimit(), CoreLimit(1))
    finally:
        os.umask(before)
    incoming = root / "incoming"
    assert _mode(incoming) == 0o3770  # members write, and remove only what is theirs
    for each in (root, *root.rglob("*")):
        assert os.lstat(each).st_gid == gid, each
        if each != incoming:
            assert _mode(each) == (0o2750 if each.is_dir() else 0o640), each
    open_store(f"posix://{root}", _KEY, group=gid).ping()
    assert _mode(root) == 0o2750
