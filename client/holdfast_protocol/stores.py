"""The attached stores, the comparison of the catalog with them, and whose they are.

`GET  /v1/stores`                                  -> Page[StoreView]
`GET  /v1/store-clocks`                            -> Page[StoreClock]
`POST /v1/catalog/check`      CheckCatalog         -> OperationView, whose result is a CatalogCheck
`POST /v1/stores/{role}/adopt` AdoptStore          -> StoreView
`GET  /v1/catalog/doubts`                          -> Page[DoubtView]
`POST /v1/catalog/confirm`    ConfirmCommits       -> DoubtView

All but the second concern every project, so a token of one project may not call these.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from holdfast_protocol.base import Name, Reply, Request, since
from holdfast_protocol.states import StoreRole


class CheckCatalog(Request):
    store: StoreRole | None = Field(default=None, description="Only the store of this role; null: every one.")
    deep: bool = Field(default=False, description="Read and hash every copy that can be read, and every chunk list.")
    confirm_missing: bool = Field(
        default=False,
        json_schema_extra=since(3),
        description="What is missing is gone, however much it is. Without this nothing is marked where most of what a "
        "store should have is missing: that is a mount's fault, and no object's.",
    )


class AdoptStore(Request):
    accept_loss: bool = Field(
        default=False, description="Adopt although the check found what the catalog does not know, and give that up."
    )


class StoreView(Reply):
    """`adopted`: the store says that it is this catalog's, in this epoch; else `problem` says why nothing in it is
    changed."""

    role: StoreRole
    kind: str
    url: str = Field(description="Without what might be secret in it.")
    adopted: bool
    problem: str | None
    checked_at: datetime | None = Field(description="The last whole comparison with the catalog.")
    checked_epoch: int | None
    checked_whole: bool | None = Field(description="Nothing was found that adopting would lose.")
    probed_at: datetime | None = Field(default=None, description="When the service last tried what the store enforces.")
    changed_at: datetime | None = Field(default=None, description="When that last came out otherwise than before.")
    weaknesses: list[str] = Field(default=[], description="What the store does not enforce and should.")


class StoreClock(Reply):
    """How far a store's clock is from that of the service's process which answers. Bad clocks have URLs refused."""

    role: StoreRole
    ahead_seconds: float | None = Field(description="The store's, ahead of the service's; null: `problem` says why.")
    tolerated_seconds: float | None = Field(
        description="From this difference on the store refuses what the service signs; null: it looks at no clock."
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
    """One kind of difference. `blocks`: the catalog lacks what the store has, and adopting the store would lose it."""

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
    whole: bool = Field(description="Nothing was found that adopting the store would lose.")
    findings: list[CheckFinding]


class CatalogCheck(Reply):
    """`away`: stores that could not be compared, and why."""

    epoch: int
    stores: list[StoreCheck]
    away: list[str]
    went_back: str | None = Field(
        default=None,
        description="What the database had acknowledged and has lost, as the service's processes remember it; null: "
        "nothing is known to be lost, or it was accepted.",
    )


class DoubtView(Reply):
    """What a rebuild of the catalog could not know. Null as project: the projects that it did not find."""

    project: str | None
    run: str | None = Field(default=None, description="Null: every run of the project.")
    reason: str | None = Field(description="Null: a person has confirmed that nothing is missing.")


class ConfirmCommits(Request):
    """A person's word: of this run, or of every run of the project, the rebuilt catalog lacks no commit."""

    project: Name
    run: Name | None = None
    reason: str | None = Field(default=None, min_length=1, max_length=1000, description="For the audit.")
