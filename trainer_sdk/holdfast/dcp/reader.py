"""`dcp.load(…, storage_reader=ckpt.reader())`: a checkpoint of the run, planned by DCP. And what it has in common with
a reader by URL (url_reader.py).

Made on every rank together, so that the documents are read once and shared. DCP's own calls need no collectives of
ours. DCP loads in place, and bytes may arrive in a tensor while they are hashed: after a failure the state is part new,
part old, part unverified, dcp.load() raises, and nothing is saved until a load or a restore has ended well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.dcp.metadata import dcp_metadata, decode_value, saved_dcp, values_of
from holdfast.errors import ConfigurationError
from holdfast.layout.reshard import StoredPieces, WantedPiece
from holdfast.restore.checkpoint_reader import CheckpointSource, SharedDocuments, read_documents
from holdfast.session.session import Session
from holdfast.state.destinations import Arrivals, in_place
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.index_documents import Layout
from holdfast_protocol.restores import RestorePoint

ROUND_BYTES = 1024**3
"""Host memory that one round of reads may take."""


class StoredReader(StorageReader):
    """A checkpoint whose documents were read, for one load. `step`: the step of the checkpoint."""

    def __init__(
        self,
        source: CheckpointSource,
        documents: SharedDocuments,
        point: RestorePoint,
        *,
        rank: int,
        layout: Layout | None = None,
    ) -> None:
        """`layout`: in place of the documents', with other names for the same tensors."""
        self.step = point.step
        self._source = source
        self._documents = documents
        self._layout = documents.layout if layout is None else layout
        self._saved = saved_dcp(documents.stored.replicated_trees)
        self._pieces = StoredPieces(self._layout, prefer_rank=rank)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise ConfigurationError(
                "Choose the checkpoint when you make the reader, as in ckpt.reader(at=…). "
                "Leave checkpoint_id out of dcp.load()."
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return dcp_metadata(self._layout, self._saved)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: everything is known since it was made."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._source:
            self._load_values([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)
            for items in _rounds(item for item in plan.items if item.type is LoadItemType.TENSOR):
                self._load_tensors(items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP never finds this reader by an id; the caller makes it."""
        return False

    def _load_values(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        owners = {self._saved.values[item.storage_index.fqn] for item in items}
        indexes = self._source.indexes(self._documents.manifest, owners)
        for item in items:
            fqn = item.storage_index.fqn
            planner.load_bytes(item, decode_value(values_of(indexes[self._saved.values[fqn]])[fqn]))

    def _load_tensors(self, items: dict[str, ReadItem], planner: LoadPlanner) -> None:
        begins = {name: tuple(item.storage_index.offset or (0,) * len(item.lengths)) for name, item in items.items()}
        wanted = {name: self._wanted(name, item, begins[name]) for name, item in items.items()}
        reads = self._pieces.plan_reads((wanted[name], items[name].storage_index.fqn, begins[name]) for name in items)
        targets = {name: planner.resolve_tensor(item) for name, item in items.items()}
        arrivals = Arrivals(wanted.values(), in_place(wanted, targets))
        self._source.read(reads, self._layout, self._documents.chunks, arrivals.rooms())
        for name, item in items.items():
            if not arrivals.is_in_place(name):
                with torch.no_grad():
                    targets[name].copy_(arrivals.own(name))
            planner.commit_tensor(item, targets[name])

    def _wanted(self, name: str, item: ReadItem, begins: tuple[int, ...]) -> WantedPiece:
        offsets = tuple(begin + inside for begin, inside in zip(begins, item.storage_offsets, strict=True))
        dtype = self._layout.tensors[item.storage_index.fqn].dtype
        return WantedPiece(name, dtype, offsets, tuple(item.lengths))


class HoldfastReader(StoredReader):
    """Made by `ckpt.reader()` on every rank."""

    def __init__(self, session: Session, workers: TransferWorkers, point: RestorePoint, *, rollback: bool) -> None:
        self._session = session
        self._point = point
        self._rollback = rollback
        source = CheckpointSource(session.client, session.run, point, workers=workers)
        documents = read_documents(session.ranks, source, rank_trees=False)
        super().__init__(source, documents, point, rank=session.ranks.rank)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # Before the first byte. Another rank may fail where this one does not: the vote on the next save hears of it.
        self._session.begin_to_restore()
        done = super().read_data(plan, planner)
        self._session.restored_from(self._point.checkpoint_id, rollback=self._rollback)
        return done


def _rounds(items: Iterable[ReadItem]) -> Iterator[dict[str, ReadItem]]:
    """The items under names of their own, in groups that fit ROUND_BYTES, or of one larger item: a chunk is fetched
    once for all reads of a group."""
    group: dict[str, ReadItem] = {}
    elements = 0
    for number, item in enumerate(items):
        more = prod(item.lengths)
        if group and (elements + more) * 8 > ROUND_BYTES:
            yield group
            group, elements = {}, 0
        if more:
            group[str(number)] = item
            elements += more
    if group:
        yield group
