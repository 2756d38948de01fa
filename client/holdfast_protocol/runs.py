"""Projects and runs.

`GET /v1/projects`                                  -> Page[ProjectView]
`PUT /v1/projects/{project}`  (If-Match, where it changes something)  EditProject -> ProjectView
`GET /v1/projects/{project}`                        -> ProjectView
`GET /v1/projects/{project}/runs?status=`           -> Page[RunView]
`PUT /v1/projects/{project}/runs/{run}`             -> RunView      (makes it; the same again is fine)
`GET /v1/projects/{project}/runs/{run}`             -> RunView

How they are deleted and taken back is in holdfast_protocol.deletion.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from pydantic import Field

from holdfast_protocol.base import LARGEST_INTEGER, Reply, Request
from holdfast_protocol.deletion import InTrash
from holdfast_protocol.restore import RestorePoint
from holdfast_protocol.states import RunStatus


class EditProject(Request):
    """What is left out stays as it is."""

    sends_defaults: ClassVar[bool] = False

    quota_bytes: int | None = Field(
        default=None, ge=0, le=LARGEST_INTEGER, description="Bytes in the primary store; null: no limit."
    )


class ProjectView(Reply):
    id: str
    name: str
    created_at: datetime
    quota_bytes: int | None
    etag: str = Field(default="", description="Of what can be edited; for If-Match.")
    stored_bytes: int = Field(description="What the copies of the project's chunks take in the store.")
    logical_bytes: int = Field(default=0, description="What the states of its committed checkpoints are.")
    deduplicated_bytes: int = Field(default=0, description="What these did not send, because it was there.")
    runs: int
    in_trash: InTrash | None = Field(default=None, description="Who deleted it; null: it is not deleted.")


class RunView(Reply):
    id: str
    project: str
    name: str
    created_at: datetime
    latest_attempt: int
    status: RunStatus | None = Field(default=None, description="Null from a service of before protocol 1.3.")
    status_detail: str | None = Field(default=None, description="Why, in a sentence, where that is known.")
    last_step: int | None = Field(
        default=None, description="The last one that its newest attempt is known to have reached."
    )
    last_heard_at: datetime | None = Field(
        default=None,
        description="When its newest attempt was last heard of: its opening, a heartbeat, a call of a save, its end. "
        "What only reads does not count.",
    )
    committed_checkpoints: int
    newest_step: int | None
    logical_bytes: int = Field(default=0, description="What the states of its committed checkpoints are.")
    deduplicated_bytes: int = Field(default=0, description="What these did not send, because it was there.")
    stored_bytes: int | None = Field(
        default=None,
        description="What the copies of their chunks take in the store, also where other runs need them too. "
        "Null in lists: it is added up for one run at a time.",
    )
    restore_point: RestorePoint | None
    in_trash: InTrash | None = Field(default=None, description="Who deleted it; null: it is not deleted.")
