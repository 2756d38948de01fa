"""The Store contract: what the service needs of the place where chunks live, whatever that place is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from holdfast_protocol.checkpoints import StoreAnswer
from holdfast_protocol.digests import MAX_DOCUMENT_BYTES
from holdfast_protocol.tiers import ClassTerms, StorageClass, ThawSpeed

# The Store contract: what the service needs of the place where chunks live, whatever that place is.
#
# Order of calls for one chunk: presign_put -> (the client sends the bytes) -> head -> ... presign_get ... -> delete.
# Every error that leaves a store is one of:
#
#     StoreError
#       ObjectMissing       there is no such object, and the store itself is there
#       ObjectMismatch      the object's bytes are not those that were announced
#       ObjectTooLarge      it has more bytes than an object of its name ever has
#       ObjectArchived      it is there and has to be thawed before it can be read
#       StoreUnavailable    no answer, or "later": retry
#       StoreFull           no room, or over its quota: an operator must act
#       StoreRefused        credentials, permissions or configuration: an operator must act
#       StoreNotOurs        it does not say that it is this catalog's, in this epoch: nothing in it is changed

_PROJECT_ID = re.compile(r"[0-9a-z](?:[0-9a-z-]{0,62}[0-9a-z])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_GENERATION = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(?:[0-9a-zA-Z_][0-9a-zA-Z_.-]{0,127}/){0,7}[0-9a-zA-Z_][0-9a-zA-Z_.-]{0,127}")

CHUNKS = "chunks"
MOST_NAMED_BYTES = MAX_DOCUMENT_BYTES
"""Of a small object beside the chunks. The largest is the record of a shard's chunk list, some 40 MB."""


class StoreUrlError(ValueError):
    """A store URL that cannot be used, and how one looks that can."""

    def __init__(self, url: str, wrong: str, example: str) -> None:
        shown = url.partition("?")[0].rpartition("@")[2]
        super().__init__(f"the store URL {shown!r} cannot be used: {wrong}. Example: {example}")


class StoreError(Exception):
    """Something went wrong in a store."""

    retryable = False


class ObjectMissing(StoreError):  # noqa: N818
    """There is no such object in the store."""


class ObjectMismatch(StoreError):  # noqa: N818
    """The object's bytes are not those that were announced."""


class ObjectTooLarge(StoreError):  # noqa: N818
    """The object has more bytes than what the service writes under such a name: something else has written it."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            f"it has more than {most_bytes} bytes, and the service writes none so large there. Something else has "
            "written it: find out what, and move it out of the store"
        )


class ObjectArchived(StoreError):  # noqa: N818
    """The object is there, in a storage class that has to be thawed before anybody can read it."""


class StoreUnavailable(StoreError):  # noqa: N818
    """The store does not answer. Try again later."""

    retryable = True


class StoreFull(StoreError):  # noqa: N818
    """The store has no room left. Free some, or raise its quota."""


class StoreRefused(StoreError):  # noqa: N818
    """The store refuses the service. Check its credentials, permissions and URL."""


class StoreNotOurs(StoreError):  # noqa: N818
    """The store does not say that it belongs to this catalog in this epoch (rule fencing-token)."""


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """One copy of one chunk. The generation is random and new for each copy, so a late delete hits no other copy.

    With `version_id` exactly that version of the object is read, and no later one; it is not part of the identity."""

    project_id: str
    digest: str
    generation: str
    version_id: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # The parts become a path. Nothing with a dot or a slash in it ever does, from any caller.
        validated_project_id(self.project_id)
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError("a digest is 64 lower-case hex digits")
        if not _GENERATION.fullmatch(self.generation):
            raise ValueError("a generation is 32 lower-case hex digits")

    @property
    def path(self) -> str:
        """Relative to the store's prefix; needs no quoting in a URL."""
        return f"{self.project_id}/{CHUNKS}/{self.digest[:2]}/{self.digest}/{self.generation}"

    @classmethod
    def from_path(cls, path: str) -> ObjectKey:
        """The inverse of `path`; ValueError for anything else."""
        parts = path.split("/")
        if len(parts) != 5:
            raise ValueError("not the path of a chunk")
        key = cls(parts[0], parts[3], parts[4])
        if key.path != path:
            raise ValueError("not the path of a chunk")
        return key


def validated_project_id(project_id: str) -> str:
    """It becomes a folder's name; ValueError if it must not."""
    if not _PROJECT_ID.fullmatch(project_id):
        raise ValueError("a project id is lower-case letters, digits and inner hyphens, at most 64")
    return project_id


def validated_name(name: str) -> str:
    """The name of a small object outside the chunks, such as `p1/manifests/c1.json`; ValueError if it is not one."""
    parts = name.split("/")
    if not _NAME.fullmatch(name) or CHUNKS in parts[:2] or parts[0] in {"incoming", "proofs"}:
        raise ValueError(f"{name!r} is no name for an object beside the chunks")
    return name


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key and its secret, as the store's vendor gives them out."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class PutTicket:
    """Send the body with exactly these headers. A `url` that begins with / is relative to the service. `answers`: what
    the store's own error codes mean, where they are not S3's."""

    method: str
    url: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    expires_in_seconds: int
    answers: dict[str, StoreAnswer] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class GetTicket:
    """Read with these headers, and a Range if wanted. `url` and `answers` as in PutTicket."""

    url: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    expires_in_seconds: int
    answers: dict[str, StoreAnswer] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What the store itself says. `sha256` (hex) is None where it did not hash the bytes: such a copy is unproven."""

    bytes: int
    sha256: str | None
    version_id: str | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing. `storage_class` is None for the store's default one, and where there are none; the store's
    own name for one that has no neutral name."""

    key: ObjectKey
    bytes: int
    modified_at: datetime
    storage_class: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probe saw the store enforce, as opposed to what it accepts and ignores."""

    sha256_enforced: bool
    sha256_reported: bool
    content_length_enforced: bool
    conditional_put: bool
    md5_enforced: bool
    range_get: bool
    versioned: bool
    probed_at: datetime
    signature_enforced: bool | None = None
    """None: an older probe did not ask."""
    changed_at: datetime | None = None
    """When a later probe last saw something else than the one before."""

    @property
    def asks_md5(self) -> bool:
        """What the store compares is the MD5, so no upload may be without one (rule enforcement-probed)."""
        return self.md5_enforced and not self.sha256_enforced

    @property
    def weaknesses(self) -> list[str]:
        """What people must know of a store that enforces less than it should; a sentence for each."""
        told = []
        if self.signature_enforced is False:
            told.append(
                "It takes uploads whose signature is wrong: any client that reaches it can write. Let no client reach "
                "it that may not."
            )
        if not self.sha256_enforced and not self.md5_enforced:
            told.append(
                "It compares no checksum with what it is sent: every upload is read back by the service before anybody "
                "else relies on it."
            )
        return told

    @property
    def binds_tickets(self) -> bool:
        """Whether a ticket that still lives changes nothing that is there: it takes the announced bytes only, or none
        over an object. An MD5 does not do it: who makes two contents with one MD5 can send either."""
        return self.sha256_enforced or self.conditional_put


@dataclass(frozen=True, slots=True)
class Opening:
    """What the service gives a store beside its URL. `signing_key` (32 bytes or more) signs the service's own URLs.
    `credentials` are the settings' own; None: the store finds them as its vendor's tools do. `group` shares the folder
    of a posix store. `capabilities` is what an earlier probe found."""

    signing_key: bytes = field(repr=False)
    credentials: Credentials | None = None
    group: int | None = None
    capabilities: Capabilities | None = None


class Store(Protocol):
    """Synchronous, safe to use from several threads. Every method raises StoreError and nothing else of its own."""

    kind: str
    capabilities: Capabilities | None
    """Set by probe(), or from an earlier probe's kept result. None: nothing is known, so nothing is relied on."""

    def presign_put(
        self, key: ObjectKey, *, stored_bytes: int, stored_sha256: str, md5: str | None = None, expires_in_seconds: int
    ) -> PutTicket:
        """A ticket for exactly these bytes (digests in hex). It never lives longer than the credentials.

        No I/O, except for a RemotelySignedStore."""

    def presign_get(self, key: ObjectKey, *, expires_in_seconds: int) -> GetTicket:
        """A ticket to read, whether or not the object exists; I/O as for presign_put."""

    def head(self, key: ObjectKey) -> ObjectFacts:
        """What the store says of the object; ObjectMissing only if the store is there and the object is not."""

    def open_read(self, key: ObjectKey) -> Iterator[bytes]:
        """The object's bytes in pieces of at most 1 MiB; a short read raises, it never just ends."""

    def put_bytes(self, key: ObjectKey, data: bytes, *, storage_class: str | None = None) -> ObjectFacts:
        """Writes an object that the service itself holds; an object that is there is left as it is. `storage_class`
        by its neutral name or the store's own, None for its default; StoreRefused where the store has none."""

    def delete(self, key: ObjectKey, version_id: str | None = None) -> None:
        """Exactly this copy, all its versions or the one named. Its absence is fine."""

    def list_objects(self, project_id: str | None) -> Iterator[StoredObject]:
        """Every chunk of a project, or of all of them, in no order. Raises rather than leave one out."""

    def write_named(self, name: str, data: bytes) -> None:
        """Writes or replaces a small object beside the chunks, whole or not at all."""

    def read_named(self, name: str, *, most_bytes: int = MOST_NAMED_BYTES) -> bytes:
        """A small object beside the chunks, whole; ObjectMissing if there is none, and ObjectTooLarge if it has more
        bytes, which are not all read then."""

    def delete_named(self, name: str) -> None:
        """Removes a small object beside the chunks. Its absence is fine."""

    def list_named(self, folder: str) -> Iterator[str]:
        """The name of every small object below `folder`, in no order. Raises rather than leave one out."""

    def guard_changes(self, guard: Callable[[], None]) -> None:
        """From now on `guard` is called before the service itself writes or deletes anything, and may raise
        StoreNotOurs. What clients upload under a new key is not held up by it."""

    def probe(self) -> Capabilities:
        """Finds out by trying, wrong bytes among it; keeps the result in `capabilities`; leaves nothing behind."""

    def clock(self) -> datetime:
        """The time by the clock that dates its objects: ours may be off."""

    def ping(self) -> None:
        """Returns if the store answers and lets the service in; raises what a real call would raise."""

    def close(self) -> None:
        """Lets connections go."""


@runtime_checkable
class MountedStore(Protocol):
    """What a store on a filesystem offers to clients that see the same mount (rule drop-box)."""

    def new_mount_proof(self, *, expires_in_seconds: int) -> tuple[str, Path]:
        """A fresh file (its id and its path) whose secret content only one who sees this mount can read."""

    def check_mount_proof(self, proof_id: str, content: str) -> bool:
        """Whether this is that content, in time."""

    def incoming_path(self, ticket_id: str) -> Path:
        """Where a client writes, and closes the file before it reports it."""

    def publish(self, ticket_id: str, key: ObjectKey, expected_bytes: int) -> None:
        """Makes the written file or a copy of it the object, never overwriting one, and removes the client's name. The
        object is durable afterwards, also if another process made it: done already is fine, and so is twice.
        ObjectMissing if the file is not (yet) seen here, ObjectMismatch (and the file is gone) if its size is wrong
        or somebody opened it to write meanwhile."""

    def object_path(self, key: ObjectKey) -> Path:
        """Where the object is, for reading."""

    def sweep_incoming(self, *, older_than_seconds: float) -> int:
        """Removes what was written and never published, and old proofs; how many files."""


@runtime_checkable
class RemotelySignedStore(Protocol):
    """A store whose tickets may each be signed by a request to another server; base.py waits for several."""

    tickets_at_once: int


# What a store with storage classes offers beside the Store contract: copies in another class, and thawing them.
#
#     copy_object (server-side, into a class) -> class_facts ... restore_object -> class_facts until it is readable
#
# What is archived has to be thawed before anybody can read it; the other classes are readable at once.


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """What the store says of an object and its class. `storage_class` is None for the store's default one.

    `thawing`: a restore request is under way. `readable_until`: the end of a thawed object's time; None for one that
    is not thawed, or needs no thaw.
    """

    facts: ObjectFacts
    storage_class: str | None
    thawing: bool
    readable_until: datetime | None


@runtime_checkable
class ClassedStore(Protocol):
    """A store whose objects have storage classes. Raises StoreError as a Store does."""

    class_terms: Mapping[StorageClass, ClassTerms]
    """The classes that it has, and what its vendor documents of them."""

    def check_storage_class(self, storage_class: StorageClass) -> None:
        """Finds out by trying, with a small object that is gone afterwards. StoreRefused if the store does not keep it
        in that class, or would let everybody read at once what it calls archived."""

    def copy_object(self, source: ObjectKey, target: ObjectKey, storage_class: StorageClass) -> ClassFacts:
        """Has the store copy an object of its own, hashing it on the way; what it says of the result. Repeatable.
        ObjectArchived if the source has to be thawed first."""

    def class_facts(self, key: ObjectKey) -> ClassFacts:
        """What the store says; ObjectMissing only if the store is there and the object is not."""

    def restore_object(self, key: ObjectKey, days: int, speed: ThawSpeed) -> None:
        """Asks for a readable copy for `days` days from its completion, or from now on if there is one. One that is on
        its way is fine. A store without temporary copies moves the object to its default class, which `class_facts`
        says then: its days have no end."""


# What a store offers that can hold objects by itself (S3 Object Lock): a legal hold, put on and taken off at any time.
#
# Only the legal hold, and no retention until a date: it needs no permission to bypass anything, is taken off when the
# last hold on the chunk is released, and a wrong date cannot lock bytes for a century
# (docs/adr/0017-a-mirrored-hold-is-a-legal-hold.md).


@runtime_checkable
class LockingStore(Protocol):
    """A Store that may be able to; whether its bucket is, it has to be asked. Raises StoreError."""

    def has_object_lock(self) -> bool:
        """Asks the bucket."""

    def set_legal_hold(self, key: ObjectKey, version_id: str | None, *, on: bool) -> None:
        """On exactly this version, or the current one if the store has no versions of it. Twice is fine.
        ObjectMissing if it is not there."""


# Makes the tickets of one call: one after the other, or several at once where each waits for a remote signature.
#
# A batch has up to a thousand chunks, and a signature over the network takes tens of milliseconds.

_Item = TypeVar("_Item")
_Ticket = TypeVar("_Ticket")


def make_tickets(store: Store, make: Callable[[_Item], _Ticket], items: Sequence[_Item]) -> list[_Ticket]:
    """`make(item)` for each, in their order. Raises what the first failing one raises."""
    at_once = store.tickets_at_once if isinstance(store, RemotelySignedStore) else 1
    if at_once == 1 or len(items) < 2:
        return [make(item) for item in items]
    with ThreadPoolExecutor(min(at_once, len(items)), thread_name_prefix="holdfast-sign") as threads:
        return list(threads.map(make, items))
