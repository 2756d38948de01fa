"""What nobody needs any more: what the collector deletes, and what a sweep finds that no row of the catalog knows.

`GET  /v1/collection`  ?project=                     -> CollectionPlan   (what would go now, and what waits)
`POST /v1/collection`                                -> OperationView    (a round now; its result is a CollectionRound)
`GET  /v1/sweeps`                                    -> SweepReport      (each store's last one)
`POST /v1/sweeps`      StartSweep                    -> OperationView    (its result is a SweepReport)
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from holdfast_protocol.base import Reply, Request
from holdfast_protocol.states import StoreRole


class WaitsFor(StrEnum):
    """Why a copy that nothing needs cannot go yet."""

    HOLD = "hold"
    """The store was told to hold it."""
    UPLOAD = "upload"
    """A checkpoint that is still uploading relies on it."""
    LEASE = "lease"
    """Somebody is at work on its chunk: it is read again, or copied."""
    TICKET = "ticket"
    """A PUT may still land: its last ticket and the longest upload are waited out."""
    STORE = "store"
    """It is marked, and its store did not delete it at the last try, or is being asked now."""


class Waiting(Reply):
    waits_for: WaitsFor
    copies: int
    bytes: int
    until: datetime | None = Field(description="When the last of them can go; null: nobody knows.")


class StoreCollection(Reply):
    """Bytes are as announced: of an upload that was given up, fewer may have arrived."""

    store: StoreRole
    problem: str | None = Field(description="Why nothing is deleted from this store now; null if it may be.")
    copies: int = Field(description="That would go now.")
    bytes: int
    waiting: list[Waiting]


class CollectionPlan(Reply):
    at: datetime
    stores: list[StoreCollection]


class CollectionRound(Reply):
    deleted_copies: int
    deleted_bytes: int
    kept_copies: int = Field(description="That a store did not let go. They are tried again.")
    forgotten_chunks: int
    problems: list[str]


class StartSweep(Request):
    store: StoreRole | None = Field(default=None, description="null: every store, one after the other.")
    dry_run: bool = Field(default=False, description="Only look.")
    force: bool = Field(
        default=False, description="Delete also where that is more than the set share. For administrators."
    )


class ProjectSweep(Reply):
    """What one project has in a store."""

    project: str
    objects: int
    bytes: int
    orphans: int = Field(description="Objects that no row of the catalog knows, of any age.")
    orphan_bytes: int
    deleted: int = Field(default=0, description="Of the orphans.")
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
    kept: int = Field(description="Orphans that turned out to be known, or that the store did not let go.")
    stopped: str | None = Field(description="Why nothing was deleted; null if nothing stood in the way.")

    @property
    def orphans(self) -> int:
        return sum(one.orphans for one in self.projects)

    @property
    def orphan_bytes(self) -> int:
        return sum(one.orphan_bytes for one in self.projects)


class SweepReport(Reply):
    stores: list[StoreSweep]
    problems: list[str] = Field(default_factory=list, description="Stores that could not be swept, and why.")
