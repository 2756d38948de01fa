"""`holdfast://` for fsspec: read-only, and found by fsspec through the entry point of this package.

    with fsspec.open("holdfast://demo/gpt@best:loss/model.safetensors") as file: ...

Each call asks the service which checkpoint a selector names; an open file stays with the one that it was opened with.
Calls and files may be used from several threads; a file has one position, so each thread opens its own, or takes
turns. In a forked process files and filesystems go on with connections and leases of that process.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from pydantic import SecretStr

from holdfast_client.client import Client
from holdfast_client.errors import (
    CheckpointCold,
    CheckpointNotFound,
    ConfigurationError,
    NoRestorePoint,
    ProjectNotFound,
    RunNotFound,
)
from holdfast_client.filesystem.checkpoint_files import CheckpointFiles, ProcessParts, ReadParts
from holdfast_client.filesystem.places import FACTS, Place, parse_place
from holdfast_client.filesystem.safetensors_layout import SafetensorsFile
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.restores import RestorePoint, skipped_in_words
from holdfast_protocol.runs import Point, SelectorError
from holdfast_protocol.states import CheckpointState

log = logging.getLogger("holdfast.client")

CACHE_BYTES = 256 * 1024**2
"""Of verified chunks, in all: four of the largest."""
_OPTIONS = {
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "asynchronous",
    "loop",
}
"""Those of fsspec itself, which any filesystem takes."""

_KEPT_CHECKPOINTS = 8
_KEPT_READERS = 4


class _Reader:
    """What the filesystems with the same settings share in one process: connections, cache, documents."""

    def __init__(self, settings: ClientSettings, process: ProcessParts, *, caches: bool) -> None:
        self.parts = ReadParts(Client(settings), process, caches=caches)
        self._lock = threading.Lock()
        self._checkpoints: OrderedDict[tuple[str, str], CheckpointFiles] = OrderedDict()

    def checkpoint(self, run: RunName, point: RestorePoint) -> CheckpointFiles:
        # By the digest too: what the catalog says of one checkpoint never changes, unless it is another catalog.
        key = (point.checkpoint_id, point.digest)
        with self._lock:
            found = self._checkpoints.pop(key, None) or CheckpointFiles(self.parts, run, point)
            self._checkpoints[key] = found
            while len(self._checkpoints) > _KEPT_CHECKPOINTS:
                self._checkpoints.popitem(last=False)
            return found

    def forget(self) -> None:
        with self._lock:
            self._checkpoints.clear()
        self.parts.cache.clear()


class _Readers:
    """The readers of this process, by settings. The one that was unused for longest is forgotten first: open files
    keep theirs. Together they keep as many bytes as the one with the largest `cache_bytes` may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[ClientSettings, int], _Reader] = OrderedDict()
        self._process: ProcessParts | None = None
        self._inherited: list[object] = []

    def of(self, settings: ClientSettings, cache_bytes: int) -> _Reader:
        key = (settings, cache_bytes)
        with self._lock:
            self._process = self._process or ProcessParts()
            found = self._readers.pop(key, None) or _Reader(settings, self._process, caches=cache_bytes > 0)
            self._readers[key] = found
            while len(self._readers) > _KEPT_READERS:
                self._readers.popitem(last=False)
            self._process.cache.most_bytes = max(most_bytes for _, most_bytes in self._readers)
            return found

    def begin_anew(self) -> None:
        """In a forked process: its parent's threads are not there, and connections and leases are the parent's. Nothing
        of them is closed here: a lock in them may be held for ever."""
        self._inherited += [self._readers, self._process]
        self._lock = threading.Lock()
        self._readers = OrderedDict()
        self._process = None


_READERS = _Readers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_READERS.begin_anew)


class HoldfastFileSystem(AbstractFileSystem):
    """Projects, runs and checkpoints as folders, the tensors of a checkpoint as files.

    Raises FileNotFoundError for what is not there, OSError (EROFS) for every write, and HoldfastError for all else.
    """

    protocol = "holdfast"
    # Instances cost nothing, and each takes the settings of its moment; what is worth keeping is in _READERS.
    cachable = False
    blocksize = 128 * 1024**2

    def __init__(
        self,
        *,
        service_url: str | None = None,
        token: str | None = None,
        cache_bytes: int = CACHE_BYTES,
        **storage_options: Any,
    ) -> None:
        """`service_url` and `token`: in place of HOLDFAST_URL and HOLDFAST_TOKEN; all other settings come from the
        environment. `cache_bytes`: the most that the process keeps of verified chunks, for all its filesystems
        together; 0 keeps none of this one's. Raises ConfigurationError, also for an option that is none."""
        if unknown := sorted(storage_options.keys() - _OPTIONS):
            raise ConfigurationError(
                f"{unknown[0]!r} is no option of holdfast://. It has service_url, token and cache_bytes."
            )
        super().__init__(**storage_options)
        given: dict[str, Any] = {"url": service_url, "token": None if token is None else SecretStr(token)}
        self._settings = ClientSettings(**{name: value for name, value in given.items() if value is not None})
        self._cache_bytes = cache_bytes

    @property
    def fsid(self) -> str:
        return f"holdfast-{self._settings.url}"

    def invalidate_cache(self, path: str | None = None) -> None:
        """Frees the memory of verified chunks and documents. Nothing in it can be out of date."""
        self._reader.forget()
        super().invalidate_cache(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Projects; a project's runs; a run's whole checkpoints, by step and attempt, the largest step first; a
        checkpoint's files."""
        path = self._strip_protocol(path)
        with _told(path, lists=True):
            place = parse_place(path)
            if place.file is not None:
                found = [self._info(path, place)]
            elif place.point is not None:
                found = self._files(path, place)
            else:
                found = list(self._folders(place))
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """`name`, `size` in bytes and `type`; of a checkpoint and its files also `checkpoint_id`, `step`, `attempt` and
        `digest`, which name it whatever its selector names later."""
        path = self._strip_protocol(path)
        with _told(path):
            return self._info(path, parse_place(path))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Raises HoldfastError if the service cannot tell: a service that does not answer is no missing file."""
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def created(self, path: str) -> datetime:
        """When the checkpoint was committed."""
        moment = self.info(path).get("created")
        if not isinstance(moment, datetime):
            raise FileNotFoundError(errno.ENOENT, "Only a checkpoint and its files have a time", path)
        return moment

    modified = created

    def ukey(self, path: str) -> str:
        """Changes exactly if the content does."""
        if self._strip_protocol(path).endswith(f"/{FACTS}"):  # labels and metrics may be edited
            return hashlib.sha256(self.cat_file(path)).hexdigest()
        found = self.info(path)
        return f"{found.get('digest', '')}/{found['name'].rpartition('/')[2]}"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes [start, end), verified. Negative numbers count from the end, as in a slice."""
        file = self._open(self._strip_protocol(path))
        with file:
            first, last, _ = slice(start, end).indices(file.size)
            file.seek(first)
            return file.read(max(0, last - first))

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> HoldfastFile:
        if mode != "rb":
            self._refuse()
        with _told(path):
            place = parse_place(path)
            if place.run is None or place.point is None:
                raise IsADirectoryError(errno.EISDIR, "It is a folder", path)
            if place.file is None:
                raise IsADirectoryError(errno.EISDIR, "It is a checkpoint; name one of its files", path)
            chosen = self._chosen(place.run, place.point, told=True)
            return HoldfastFile(self, path, place.run, chosen, place.file)

    def _type(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    @property
    def _reader(self) -> _Reader:
        return _READERS.of(self._settings, self._cache_bytes)

    def _checkpoint(self, run: RunName, point: RestorePoint) -> CheckpointFiles:
        return self._reader.checkpoint(run, point)

    def _chosen(self, run: RunName, point: Point, *, told: bool = False) -> RestorePoint:
        decision = self._reader.parts.client.restores.restore_point(run.project, run.run, str(point))
        if decision.restore_point is None:
            skipped = skipped_in_words(decision.skipped)
            raise NoRestorePoint(f"{run}@{point} has no checkpoint to read" + (f": {skipped}." if skipped else "."))
        if told:
            for note in decision.notes(f"{run}@{point}"):
                _warn_once(note)
        return decision.restore_point

    def _info(self, path: str, place: Place) -> dict[str, Any]:
        client = self._reader.parts.client
        if place.run is None:
            if place.project is not None:
                client.projects.get(place.project)
            return _folder(path)
        if place.point is None:
            client.runs.get(place.run.project, place.run.run)
            return _folder(path)
        if place.file is not None:
            return self._file_info(path, place.run, self._chosen(place.run, place.point), place.file)
        try:
            return _of_checkpoint(_folder(path), self._chosen(place.run, place.point))
        except CheckpointCold:  # its files cannot be read now, and the folder is there
            view = client.checkpoints.select(place.run.project, place.run.run, str(place.point))
            return _of_checkpoint(_folder(path), view)

    def _file_info(self, path: str, run: RunName, chosen: RestorePoint, name: str) -> dict[str, Any]:
        checkpoint = self._checkpoint(run, chosen)
        size = len(checkpoint.facts()) if name == FACTS else checkpoint.file(name).bytes
        return _of_checkpoint({"name": path, "size": size, "type": "file"}, chosen)

    def _files(self, path: str, place: Place) -> list[dict[str, Any]]:
        assert place.run is not None
        assert place.point is not None
        chosen = self._chosen(place.run, place.point)
        names = [*self._checkpoint(place.run, chosen).names(), FACTS]
        return [self._file_info(f"{path}/{name}", place.run, chosen, name) for name in sorted(names)]

    def _folders(self, place: Place) -> Iterator[dict[str, Any]]:
        client = self._reader.parts.client
        if place.project is None:
            yield from (_folder(project.name) for project in client.projects.all())
        elif place.run is None:
            yield from (_folder(f"{place.project}/{run.name}") for run in client.runs.all(place.project))
        else:
            whole = client.checkpoints.all(place.run.project, place.run.run, state=CheckpointState.COMMITTED)
            for view in whole:
                yield _of_checkpoint(_folder(f"{place.run}@{view.step}#{view.attempt}"), view)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(
            errno.EROFS, "holdfast:// is read-only: a training job saves checkpoints, an operator deletes them"
        )

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = copy = mv = touch = pipe_file = put_file = _refuse


class HoldfastFile(AbstractBufferedFile):
    """A file of one checkpoint, for reading at any position. It holds a lease, which is renewed by reading and ends
    with `close`; a file that is forgotten is closed when it is collected."""

    loc: int
    size: int
    _held: CheckpointFiles | None = None

    def __init__(self, fs: HoldfastFileSystem, path: str, run: RunName, point: RestorePoint, name: str) -> None:
        self._run, self._point, self._name = run, point, name
        self._last_end = -1
        self._content: bytes | None = None
        self._layout: SafetensorsFile | None = None
        self._held_in = 0
        self.fs = fs
        try:
            checkpoint = self._checkpoint()
            if name == FACTS:
                self._content = checkpoint.facts()
                size = len(self._content)
            else:
                self._layout = checkpoint.file(name)
                size = self._layout.bytes
            # What is kept is whole chunks, verified: a second cache of unaligned blocks would be of no use.
            super().__init__(fs, path, "rb", cache_type="none", size=size)
        except BaseException:
            self._release()
            raise
        self.details = _of_checkpoint({"name": path, "size": size, "type": "file"}, point)

    def read(self, length: int | None = -1) -> bytes:
        """At most `length` bytes, fewer only at the end; all that are left without it or if it is negative."""
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        left = max(0, self.size - self.loc)
        wanted = left if length is None or length < 0 else min(int(length), left)
        if not wanted:
            return b""
        # Filled in place and given out without a second copy, as bytes(bytearray) would make one.
        stream = io.BytesIO()
        stream.seek(wanted - 1)
        stream.write(b"\0")
        with stream.getbuffer() as buffer:
            self._fill(buffer)
        return stream.getvalue()

    def readinto(self, b: Any) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        buffer = memoryview(b).cast("B")
        buffer = buffer[: max(0, self.size - self.loc)]
        if buffer.nbytes:
            self._fill(buffer)
        return buffer.nbytes

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._release()

    def __del__(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._held_in == os.getpid():
            held.closed_by_collector()
        super().__del__()

    def __reduce__(self) -> Any:
        """Another process opens the same checkpoint, whatever the selector names by then."""
        return _reopened, (self.fs, f"{self._run}@{self._point.checkpoint_id}/{self._name}", self.loc)

    def _fetch_range(self, start: int, end: int) -> bytes:
        buffer = bytearray(end - start)
        self._read_into(start, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, buffer: memoryview) -> None:
        self._read_into(self.loc, buffer)
        in_order, self._last_end = self.loc == self._last_end, self.loc + buffer.nbytes
        self.loc = self._last_end
        if in_order and self._layout is not None:
            self._checkpoint().read_ahead(self._layout, self.loc)

    def _read_into(self, start: int, buffer: memoryview) -> None:
        if self._content is not None:
            buffer[:] = self._content[start : start + buffer.nbytes]
        elif self._layout is not None:
            self._checkpoint().read_into(self._layout, start, buffer)

    def _checkpoint(self) -> CheckpointFiles:
        """This process's: a fork leaves the lease to its parent and takes one of its own."""
        if self._held is None or self._held_in != os.getpid():
            checkpoint = self.fs._checkpoint(self._run, self._point)
            checkpoint.opened()
            self._held, self._held_in = checkpoint, os.getpid()
        return self._held

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._held_in == os.getpid():
            held.closed_soon()


def _reopened(fs: HoldfastFileSystem, path: str, position: int) -> HoldfastFile:
    file = fs._open(path)
    file.seek(position)
    return file


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """A data loader may open the same file again and again."""
    log.warning("%s", text)


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _of_checkpoint(info: dict[str, Any], of: RestorePoint | CheckpointView) -> dict[str, Any]:
    checkpoint_id = of.checkpoint_id if isinstance(of, RestorePoint) else of.id
    facts = {"checkpoint_id": checkpoint_id, "step": of.step, "attempt": of.attempt, "digest": of.digest}
    return {**info, **facts, "created": of.committed_at}


@contextmanager
def _told(path: str, *, lists: bool = False) -> Iterator[None]:
    """What is not there or must be thawed first, as Python says it: tools that take any filesystem know no error of
    ours. `lists`: fsspec leaves a folder with an error out, without a word."""
    try:
        yield
    except CheckpointCold as error:
        if lists:
            _warn_once(f"{path} has no files now: {error}")
        raise OSError(errno.ENODATA, str(error), path) from error
    except (ProjectNotFound, RunNotFound, CheckpointNotFound, NoRestorePoint, SelectorError) as error:
        raise FileNotFoundError(errno.ENOENT, str(error), path) from error
