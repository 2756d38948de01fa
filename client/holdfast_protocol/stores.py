"""The attached stores: compared with the catalog, claimed, tried with samples, cleared of unneeded copies and objects.

A token of one project may call only the second of these, because the others concern every project:
`GET  /v1/stores`                                  -> Page[StoreView]
`GET  /v1/store-clocks`                            -> Page[StoreClock]
`POST /v1/catalog/checks`     CheckCatalog         -> OperationView, whose result is a CatalogCheck
`POST /v1/stores/{role}/claim` ClaimStore          -> StoreView
`GET  /v1/catalog/doubts`                          -> Page[DoubtView]
`POST /v1/catalog/confirmations` ConfirmCommits    -> DoubtView

Unneeded copies, which the collector deletes, and objects that no row of the catalog knows, which a sweep finds:
`GET  /v1/collections/plan`  ?project=  -> CollectionPlan   (the copies that would go now, and what others wait for)
`POST /v1/collections`                  -> OperationView    (a pass now; its result is a CollectionPass)
`GET  /v1/sweeps`                       -> SweepReport      (each store's last one)
`POST /v1/sweeps`      StartSweep       -> OperationView    (its result is a SweepReport)

A sample object shows that a client reaches the store, and leaves nothing behind; `holdfast doctor` sends one. It
belongs to no project and no run, and has no row. Its id is a secret of its maker:
`POST   /v1/store-samples`              MakeSample -> SampleOffer
`POST   /v1/store-samples/{id}/check`             -> SampleChecked
`DELETE /v1/store-samples/{id}`

The proxy on the way to a store is chosen here too, by HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY (also in lower
case). The libraries differ in what they read, and service and clients must reach a store in the same way.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Annotated
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from pydantic import Field, StringConstraints

from holdfast_protocol.base import Digest, Name, Reply, Request, example, since
from holdfast_protocol.checkpoints import UploadTicket
from holdfast_protocol.restores import ReadTicket
from holdfast_protocol.states import StoreRole


class CheckCatalog(Request):
    model_config = example({"store": "second", "deep": True})

    store: StoreRole | None = Field(default=None, description="Only the store of this role; null: every one.")
    deep: bool = Field(default=False, description="Read and hash every copy that can be read, and every chunk list.")
    confirm_missing: bool = Field(
        default=False,
        json_schema_extra=since(3),
        description="Missing objects are gone, however many they are. Without this nothing is marked if most of a "
        "store should have is missing: that is a mount's fault, and no object's.",
    )


class ClaimStore(Request):
    model_config = example({"accept_loss": False})

    accept_loss: bool = Field(
        default=False,
        description="Claim although the check found objects that the catalog does not know, and give those up.",
    )


class StoreView(Reply):
    """`claimed`: the store names this catalog, in this epoch, as its owner; else `problem` says why nothing in it is
    changed."""

    role: StoreRole
    kind: str
    url: str = Field(description="Without parts that may be secret.")
    claimed: bool
    problem: str | None
    checked_at: datetime | None = Field(description="The last whole comparison with the catalog.")
    checked_epoch: int | None
    checked_whole: bool | None = Field(description="Claiming would lose nothing.")
    probed_at: datetime | None = Field(
        default=None, description="When the service last tested what the store enforces."
    )
    changed_at: datetime | None = Field(default=None, description="When that result last changed.")
    weaknesses: list[str] = Field(default=[], description="Checks that the store should enforce and does not.")


class StoreClock(Reply):
    """How far a store's clock is from the answering process's. A store with a bad clock refuses URLs."""

    role: StoreRole
    ahead_seconds: float | None = Field(description="The store's, ahead of the service's; null: `problem` says why.")
    tolerated_seconds: float | None = Field(
        description="From this difference on the store refuses the service's signatures; null: it checks no clock."
    )
    problem: str | None = None


class FindingKind(StrEnum):
    MISSING_OBJECTS = "missing_objects"
    WRONG_SIZES = "wrong_sizes"
    DAMAGED_COPIES = "damaged_copies"
    UNKNOWN_OBJECTS = "unknown_objects"
    MISSING_RECORDS = "missing_records"
    OLD_RECORDS = "old_records"
    DIFFERENT_RECORDS = "different_records"
    DAMAGED_RECORDS = "damaged_records"
    UNKNOWN_RECORDS = "unknown_records"
    BEGUN_RECORDS = "begun_records"
    NEWER_RECORDS = "newer_records"
    UNRECORDED = "unrecorded"
    OUTDATED_RECORDS = "outdated_records"
    REMOVED_RECORDS = "removed_records"
    LEFT_RECORDS = "left_records"
    FOREIGN_RECORDS = "foreign_records"


class CheckFinding(Reply):
    """One kind of difference. `blocks`: the catalog lacks objects of the store, and claiming the store would lose
    them."""

    kind: FindingKind
    count: int
    bytes: int
    blocks: bool
    what: str
    remedy: str
    examples: list[str]


class StoreCheck(Reply):
    role: StoreRole
    objects: int
    object_bytes: int
    copies: int = Field(description="Rows that say that the store has an object.")
    read_copies: int = Field(description="With `deep`: copies that were read and hashed.")
    records: int
    whole: bool = Field(description="Claiming the store would lose nothing.")
    findings: list[CheckFinding]


class CatalogCheck(Reply):
    """`unavailable`: stores that could not be compared, and why."""

    epoch: int
    stores: list[StoreCheck]
    unavailable: list[str]
    went_back: str | None = Field(
        default=None,
        description="Changes that the database acknowledged and lost, as the service's processes remember them; null: "
        "no loss is known, or it was accepted.",
    )


class DoubtView(Reply):
    """A fact that a rebuild of the catalog could not know. `project` null: the projects that it did not find."""

    project: str | None
    run: str | None = Field(default=None, description="Null: every run of the project.")
    reason: str | None = Field(description="Null: a person has confirmed that nothing is missing.")


class ConfirmCommits(Request):
    """A person confirms: the rebuilt catalog lacks no commit of this run, or of any run of the project."""

    model_config = example({"project": "demo", "run": "gpt-2", "reason": "a new run"})

    project: Name
    run: Name | None = None
    reason: str | None = Field(default=None, min_length=1, max_length=1000, description="For the audit.")


MAX_SAMPLE_BYTES = 1024 * 1024


class MakeSample(Request):
    model_config = example(
        {"digest": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c", "bytes": 65536}
    )

    digest: Digest = Field(description="SHA-256 of the sample's bytes.")
    bytes: int = Field(ge=1, le=MAX_SAMPLE_BYTES)
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = None


class SampleOffer(Reply):
    id: str
    ticket: UploadTicket


class SampleChecked(Reply):
    """The store has the sample, with the announced size."""

    hashed_by_store: bool = Field(description="The store itself says the right SHA-256.")
    ticket: ReadTicket


class WaitsFor(StrEnum):
    """Why an unneeded copy cannot be deleted yet."""

    HOLD = "hold"
    """The store was told to hold it."""
    UPLOAD = "upload"
    """A checkpoint that is still uploading relies on it."""
    LEASE = "lease"
    """A controller works on its chunk: reads it again, or copies it."""
    TICKET = "ticket"
    """A PUT may still arrive until its last ticket and the longest upload are over."""
    STORE = "store"
    """It is marked; its store did not delete it at the last try, or is being asked now."""


class Waiting(Reply):
    waits_for: WaitsFor
    copies: int
    bytes: int
    until: datetime | None = Field(description="When the last of them can be deleted; null: unknown.")


class StoreCollection(Reply):
    """Announced bytes: of an upload that was given up, fewer may have arrived."""

    store: StoreRole
    problem: str | None = Field(description="Why nothing is deleted from this store now; null if it may be.")
    copies: int = Field(description="Copies that would be deleted now.")
    bytes: int
    waiting: list[Waiting]


class CollectionPlan(Reply):
    at: datetime
    stores: list[StoreCollection]


class CollectionPass(Reply):
    deleted_copies: int
    deleted_bytes: int
    kept_copies: int = Field(description="Copies that a store did not delete. They are tried again.")
    forgotten_chunks: int
    problems: list[str]


class StartSweep(Request):
    model_config = example({"store": "second", "dry_run": True})

    store: StoreRole | None = Field(default=None, description="null: every store, one after the other.")
    dry_run: bool = Field(default=False, description="Only look.")
    force: bool = Field(default=False, description="Delete even more than the set share. For administrators.")


class ProjectSweep(Reply):
    """One project's objects in a store."""

    project: str
    objects: int
    bytes: int
    orphans: int = Field(description="Objects that no row of the catalog knows, of any age.")
    orphan_bytes: int
    deleted: int = Field(default=0, description="Deleted orphans.")
    deleted_bytes: int = 0
    missing: int = Field(description="Rows whose object is not there.")


class StoreSweep(Reply):
    store: StoreRole
    swept_at: datetime
    dry_run: bool
    projects: list[ProjectSweep]
    due_orphans: int = Field(description="Orphans that are old enough to be deleted.")
    due_bytes: int
    deleted: int
    deleted_bytes: int
    kept: int = Field(description="Orphans that turned out to be known, or that the store did not delete.")
    stopped: str | None = Field(description="Why nothing was deleted; null if deletion was possible.")

    @property
    def orphans(self) -> int:
        return sum(one.orphans for one in self.projects)

    @property
    def orphan_bytes(self) -> int:
        return sum(one.orphan_bytes for one in self.projects)


class SweepReport(Reply):
    stores: list[StoreSweep]
    problems: list[str] = Field(default_factory=list, description="Stores that could not be swept, and why.")


_TOLD_BY_THE_CLOUD = ("metadata.google.internal", "169.254.169.254")
"""Where a cloud tells a machine of itself."""


def is_this_machine(host: str) -> bool:
    """`localhost`, a name below it, and the addresses of the loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def proxy_for(url: str) -> str | None:
    """The proxy that requests to `url` go by; None: they go directly. Raises ValueError if it is no URL."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    host = parts.hostname or ""
    if host in _TOLD_BY_THE_CLOUD or is_this_machine(host):
        return None
    if proxy_bypass_environment(parts.netloc.rpartition("@")[2], proxies) or _in_a_network(host, proxies.get("no", "")):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if found.scheme not in {"http", "https"} or not found.hostname:
        raise ValueError("HTTPS_PROXY, HTTP_PROXY or ALL_PROXY is no http:// or https:// URL; correct it")
    return found.geturl()


def _in_a_network(host: str, left_out: str) -> bool:
    """Whether it is an address in one of NO_PROXY's networks, such as 10.0.0.0/8. Python's own look leaves them out."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for each in left_out.split(","):
        with suppress(ValueError):
            if address in ipaddress.ip_network(each.strip(), strict=False):
                return True
    return False


def split_login(proxy: str) -> tuple[str, str | None]:
    """The proxy's URL without its login, and the login, `user:password`."""
    parts = urlsplit(proxy)
    login = None if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", login
