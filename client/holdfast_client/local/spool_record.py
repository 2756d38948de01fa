"""What the spool keeps of one rank's save beside its chunks: all that begin and seal need. Pure.

A record is a JSON document that carries its own SHA-256: one that a dying disk or a loss of power has torn is told from
one that is whole, and nothing of a torn one is ever pushed.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_protocol.base import Digest, Name
from holdfast_protocol.canonical_json import DocumentError, canonical_bytes, parse
from holdfast_protocol.checkpoints import Component, ComponentName, HealthVerdict, IndexOrdinals, Metrics, Step
from holdfast_protocol.fencing import LaunchId
from holdfast_protocol.selectors import RunName
from holdfast_protocol.states import CheckpointKind

VERSION: Literal[1] = 1


class SpooledChunk(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: Digest
    bytes: int = Field(ge=0)
    item_bytes: int = Field(default=1, ge=1, description="Of its floating-point numbers; where it is compressed.")


class SpoolRecord(BaseModel):
    """One rank's shard of one save, as the attempt that staged it would have sealed it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = VERSION
    project: Name
    run: Name
    epoch: int = Field(ge=1)
    attempt: int = Field(ge=1)
    launch_id: LaunchId = Field(description="Of the attempt: tells it from one of the same number elsewhere.")
    number: int = Field(ge=1, description="Counts the saves of the attempt, alike on all ranks.")
    step: Step
    kind: CheckpointKind
    world_size: int = Field(ge=1)
    rank: int = Field(ge=0)
    chunks: list[SpooledChunk] = Field(min_length=1, description="By ordinal; the documents among them.")
    index: IndexOrdinals
    components: dict[str, Component]
    finite: bool
    metrics: Metrics | None
    verdict: HealthVerdict | None = None
    dropped_components: list[ComponentName] = Field(default_factory=list)
    blocked_seconds: float | None = Field(default=None, ge=0)
    host: str
    created_at: datetime

    @property
    def name(self) -> str:
        """Its file's and its hold's: no other save of any rank has it."""
        return record_name(self.launch_id, self.number, self.rank)

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)

    @property
    def logical_bytes(self) -> int:
        return sum(component.logical_bytes for component in self.components.values())

    @property
    def chunk_bytes(self) -> int:
        """Of its distinct chunks."""
        return sum({chunk.digest: chunk.bytes for chunk in self.chunks}.values())

    def encode(self) -> bytes:
        """The inverse of decode_record."""
        body = self.model_dump(mode="json")
        return canonical_bytes({"record": body, "sha256": _digest_of(body)})


def record_name(launch_id: str, number: int, rank: int) -> str:
    return f"spool-{hashlib.sha256(launch_id.encode()).hexdigest()[:32]}-{number}-{rank}"


def decode_record(document: bytes) -> SpoolRecord:
    """Raises DocumentError for what is torn, altered, or from a newer version."""
    outer = parse(document)
    if not isinstance(outer, dict) or set(outer) != {"record", "sha256"} or not isinstance(outer["record"], dict):
        raise DocumentError("this is not a record of the spool")
    if not hmac.compare_digest(_digest_of(outer["record"]), str(outer["sha256"])):
        raise DocumentError("this record of the spool was torn or altered")
    if outer["record"].get("version") != VERSION:
        raise DocumentError("a newer version of holdfast has written this record; push it with that one")
    try:
        return SpoolRecord.model_validate(outer["record"])
    except ValidationError as error:
        raise DocumentError(f"this record of the spool has {error.error_count()} fields that do not fit") from None


def _digest_of(body: object) -> str:
    return hashlib.sha256(canonical_bytes(body)).hexdigest()
