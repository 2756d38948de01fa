"""Pushes one checkpoint to a bucket or another place of fsspec, as the files that a pull writes.

    pull into a folder of this machine -> compare with what is there -> send what differs -> last what makes it whole

What is there is read back and compared by SHA-256. So a push that was interrupted is run again and goes on, and one
that was finished is proven by it. No tool takes a half of it for whole: config.json, an index of several files,
`.metadata` of DCP and at the very end checkpoint.json come last, and go before anything is replaced. So do files of an
earlier push that this one does not write: from_pretrained() would prefer an old model.safetensors to a new index. Until
all is there, a list of what pushes may have left lies there too: what a killed one left is known by it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from holdfast.export.hf.folder import HfChoices
from holdfast.export.hf.model_files import CONFIG
from holdfast.export.hf.weight_files import INDEX
from holdfast.export.publish import work_folder
from holdfast.export.pull import Format, OnBytes, OnNote, OnTotal, pull
from holdfast_client.client import Client
from holdfast_client.errors import ConfigurationError, HoldfastError
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Point
from holdfast_protocol.text import counted, without_secrets

_FACTS = "checkpoint.json"
_LAST = (CONFIG, INDEX, ".metadata")
"""Without these no tool opens the folder."""
_UNDER_WAY = ".holdfast-push.json"
_TAKEN_FOR_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_config\.json")
"""Of a folder for from_pretrained(): what it loads, or a server of models does, also where another file is newer."""
_BLOCK_BYTES = 8 * 1024**2
_OTHER_WAYS = {
    "holdfast": "A second store keeps copies of checkpoints",
    "hf": "Pull it with --format hf, and `hf upload` the folder: the Hub takes a model in one commit",
}


class NotSent(HoldfastError):  # noqa: N818  (as the tree of holdfast_client.errors)
    code = "not_sent"
    remedy = "Mend that and run the same command again: it goes on with what is missing."


def push(
    client: Client,
    run: RunName,
    point: Point,
    url: str,
    format_: Format,
    *,
    only: Collection[str] = (),
    hf: HfChoices | None = None,
    force: bool = False,
    work: Path | None = None,
    on_total: OnTotal = lambda count: None,
    on_bytes: OnBytes = lambda count: None,
    on_note: OnNote = lambda note: None,
) -> dict[str, Any]:
    """Returns the content of `checkpoint.json`, with `sent` and `kept`: the names of files.

    `force`: replaces another checkpoint there, also one that no push has written; other files stay. `work`: the folder
    for the pulled files, in place of the system's for temporary ones. `on_total` and `on_bytes` are of the pull. Raises
    ConfigurationError for a URL that fsspec cannot open and for other files there, NotSent, and what a pull raises.
    """
    target = _Target(url)
    with work_folder(work or Path(tempfile.gettempdir()), "push") as beside:
        folder = beside / "files"
        found = client.restores.restore_point(run.project, run.run, str(point)).restore_point
        if found is not None and not force:  # told before anything is fetched
            target.refuse_another(found.checkpoint_id, format_)
        summary = pull(
            client,
            run,
            point,
            folder,
            format_,
            only=only,
            hf=hf,
            on_total=on_total,
            on_bytes=on_bytes,
            on_note=on_note,
        )
        if not force:  # the selector may name another one by now
            target.refuse_another(summary["id"], format_)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        stale = target.stale(names, format_, force=force)
        sent = _send(target, folder, names, stale, on_note)
    return {**summary, "sent": sent, "kept": [name for name in names if name not in sent]}


def _send(target: _Target, folder: Path, names: list[str], stale: set[str], on_note: OnNote) -> list[str]:
    """The names of what was sent, in their order."""
    in_order = sorted(names, key=lambda name: (name == _FACTS, name in _LAST, name))
    sent = [name for name in in_order if not target.has(name, folder / name)]
    if stale or set(sent) - {_FACTS}:
        target.begin(names, stale)
        for name in sorted(stale):
            on_note(f"{name} is removed: it is not of this push.")
        sent = [name for name in in_order if name in {*sent, *_LAST, _FACTS}]
    for name in sent:
        target.send(name, folder / name)
        on_note(f"{name} is sent.")
    target.end()
    return sent


class _Target:
    """A folder of any file system that fsspec knows. Its errors name the URL, and no secret."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            is_plain = "@" not in parts.netloc and not parts.query and parts.scheme and "::" not in url
            _ = parts.port  # of a password with a slash in it, this is no number
        except ValueError:
            is_plain = False
        if not is_plain:
            raise ConfigurationError(
                "This is not the URL of a folder. Write for example s3://bucket/gpt, and leave credentials to the "
                "environment."
            )
        if parts.scheme in _OTHER_WAYS:
            raise ConfigurationError(f"Nothing is pushed to {parts.scheme}://. {_OTHER_WAYS[parts.scheme]}.")
        try:
            from fsspec.core import url_to_fs

            options = {"auto_mkdir": True} if parts.scheme in ("file", "local") else {}
            self._fs, self._root = url_to_fs(url.rstrip("/"), **options)
        except Exception as error:  # every file system has errors of its own
            raise ConfigurationError(
                f"{url} cannot be opened: {_said(error)}. Install what fsspec needs for it, or give it its credentials."
            ) from None
        self._url = url
        self._facts = self._read(_FACTS)
        if self._facts == {}:
            raise ConfigurationError(f"{_FACTS} at {url} is not of Holdfast. Name another place.")
        self._under_way = self._read(_UNDER_WAY)
        self._token: str | None = None

    def refuse_another(self, checkpoint_id: str, format_: Format) -> None:
        """Raises ConfigurationError if another checkpoint is there, or this one in another format."""
        there = self._facts
        if there is not None and (there.get("id"), there.get("format")) != (checkpoint_id, format_):
            raise ConfigurationError(
                f"{self._url} has step {there.get('step')} of {there.get('project')}/{there.get('run')} as "
                f"{there.get('format')}. Name another place, or replace it with --force."
            )

    def stale(self, names: list[str], format_: Format, *, force: bool) -> set[str]:
        """What earlier pushes have left there beside these, and with `force` what would be loaded in place of these.
        Raises ConfigurationError for other files, and without `force` for each that a whole checkpoint there lists."""
        with self._told("listed"):
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                self._fs.ls(self._root)  # find() says nothing of a folder that it cannot list
            found = {str(path)[len(self._root) :].lstrip("/") for path in self._fs.find(self._root)} - {_UNDER_WAY}
        left = _files_in(self._under_way)
        is_ours = self._facts is not None or self._under_way is not None
        if not force and (others := sorted(found - left - set(names if is_ours else ()))):
            raise ConfigurationError(
                f"{self._url} has {counted(len(others), 'file')} not of this push, such as {others[0]!r}. "
                "Name another place, or replace a checkpoint there with --force."
            )
        instead = set(filter(_TAKEN_FOR_WEIGHTS.fullmatch, found)) if force and format_ is Format.HF else set()
        return (found & (left | _files_in(self._facts)) | instead) - set(names)

    def begin(self, names: list[str], stale: set[str]) -> None:
        """From here on no tool takes the folder for whole."""
        self._token = secrets.token_hex(8)
        known = sorted({*names, *stale, *_files_in(self._under_way)})
        with self._told("written to"):
            self._fs.pipe_file(self._of(_UNDER_WAY), json.dumps({"push": self._token, "files": known}).encode())
        self._remove(stale | set(_LAST) & set(names))
        self._remove({_FACTS})  # last: a push that is killed before this knows what is there

    def end(self) -> None:
        self._remove({_UNDER_WAY})

    def has(self, name: str, path: Path) -> bool:
        """Whether it is there with the bytes of `path`: it is read back, if it has their number."""
        with self._told(f"asked for {name}"):
            try:
                if self._fs.info(self._of(name))["size"] != path.stat().st_size:
                    return False
                with self._fs.open(self._of(name), "rb") as there, path.open("rb") as ours:
                    return _digest(there) == _digest(ours)
            except FileNotFoundError:
                return False

    def send(self, name: str, path: Path) -> None:
        if self._token is not None and (self._read(_UNDER_WAY) or {}).get("push") != self._token:
            raise NotSent(f"Another push has begun at {self._url}, and {name} would be among its files")
        with self._told(f"sent {name}"):
            # Within a transaction an error leaves no half of a file, where the file system has transactions.
            with self._fs.transaction, self._fs.open(self._of(name), "wb") as into, path.open("rb") as ours:
                shutil.copyfileobj(ours, into, _BLOCK_BYTES)
            self._fs.invalidate_cache()
            if (size := self._fs.info(self._of(name))["size"]) != path.stat().st_size:
                raise NotSent(f"{name} has {size} bytes at {self._url}, and {path.stat().st_size} were sent")

    def _remove(self, names: set[str]) -> None:
        for name in sorted(names):
            with self._told(f"removed {name}"):
                if self._fs.exists(self._of(name)):
                    self._fs.rm_file(self._of(name))

    def _of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _read(self, name: str) -> dict[str, Any] | None:
        """None if it is not there, and empty if it is none of ours."""
        with self._told(f"asked for {name}"):
            try:
                found = json.loads(self._fs.cat_file(self._of(name)))
            except FileNotFoundError:
                return None
            except (ValueError, RecursionError):
                return {}
        return found if isinstance(found, dict) else {}

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except HoldfastError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise NotSent(f"{self._url} could not be {what}: {_said(error)}") from None


def _said(error: Exception) -> str:
    return without_secrets(str(error).partition("\n")[0]) or type(error).__name__


def _files_in(written: dict[str, Any] | None) -> set[str]:
    """Names in a document that a stranger may have written."""
    files = (written or {}).get("files")
    return {name for name in files if isinstance(name, str)} if isinstance(files, list) else set()


def _digest(file: IO[bytes]) -> bytes:
    found = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        found.update(block)
    return found.digest()
