"""Deleting runs and projects, and taking them back from the trash.

`DELETE /v1/projects/{project}/runs/{run}`  (If-Match)        DeleteAll  -> Deletion
`POST   /v1/projects/{project}/runs/{run}/undelete`                      -> TakenBack
`DELETE /v1/projects/{project}`             (If-Match)        DeleteAll  -> Deletion
`POST   /v1/projects/{project}/undelete`                                 -> TakenBack
`GET    /v1/projects/{project}/runs?deleted=true`, `GET /v1/projects?deleted=true`: what is in the trash

A dry run changes nothing and gives the ETag of what it has seen; the deletion names that one, or `*`.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from holdfast_protocol.base import Reply, Request
from holdfast_protocol.pruning import FreedBytes


class DeleteAll(Request):
    reason: str = Field(default="", max_length=1000, description="For those who look for it later.")
    dry_run: bool = False


class InTrash(Reply):
    """Who deleted it, and until when it can be taken back."""

    deleted_at: datetime
    deleted_by: str
    reason: str | None
    purge_at: datetime = Field(description="From then on it is purged, once nothing of it is held, pinned or read.")


class Deletion(Reply):
    """`run` null: of a project, which has no runs any more that are not deleted."""

    project: str
    run: str | None = None
    dry_run: bool
    etag: str = Field(description="Of what was seen; for If-Match.")
    checkpoints: int = Field(description="Committed ones that go to the trash.")
    logical_bytes: int = Field(description="What their states are.")
    freed: FreedBytes
    in_trash: InTrash | None = Field(description="Null in a dry run of what is not deleted yet.")


class TakenBack(Reply):
    project: str
    run: str | None = None
    checkpoints: int = Field(description="That are committed again.")
    purged: int = Field(description="Whose purge had begun: they stay deleted.")
