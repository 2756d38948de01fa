"""`dcp.load(…, storage_reader=holdfast.dcp_reader("holdfast://demo/gpt@latest"))`: any checkpoint, without a
Checkpointer: no attempt is opened, none is fenced, and the load is told to nobody.

DCP's own reader of URLs would need a pickled `.metadata`. This one gives DCP the metadata as an object, made from the
documents, and reads as `ckpt.reader()` does.
"""

from __future__ import annotations

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from holdfast.dcp.metadata import is_dcp
from holdfast.dcp.reader import StoredReader
from holdfast.distributed.ranks import Ranks
from holdfast.errors import ConfigurationError
from holdfast.restore.checkpoint_reader import CheckpointSource, read_documents
from holdfast.restore.partial import resolve
from holdfast.settings import TrainerSettings
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.filesystem.places import Place, parse_place
from holdfast_protocol.index_documents import Layout
from holdfast_protocol.runs import SelectorError

_SCHEME = "holdfast://"


class UrlReader(StoredReader):
    """Made by `holdfast.dcp_reader(url)` on every rank."""

    def __init__(self, url: str) -> None:
        place = checkpoint_in(url)
        assert place.run is not None
        run, point_of_run = place.run, str(place.point or "latest")
        settings = TrainerSettings()
        self._client = Client()
        self._workers = TransferWorkers(settings.transfers)
        ranks = Ranks(timeout_seconds=settings.collective_timeout_seconds)
        try:
            point = ranks.from_first(lambda: resolve(self._client, run, point_of_run))
            self._source = source = CheckpointSource(self._client, run, point, workers=self._workers)
            documents = read_documents(ranks, source, rank_trees=False)
            own_names = is_dcp(documents.stored.replicated_trees)
            layout = documents.layout if own_names else dotted(documents.layout)
            super().__init__(source, documents, point, rank=ranks.rank, layout=layout)
        except BaseException:
            self.close()
            raise
        finally:
            ranks.close()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        finally:
            self.close()

    def close(self) -> None:
        """For a reader that loads nothing; a load ends with it."""
        if hasattr(self, "_source"):  # its constructor may have failed before
            self._source.close()
        self._workers.close()
        self._client.close()


def dcp_reader(url: str) -> UrlReader:
    """A storage reader for torch.distributed.checkpoint.load: `holdfast://demo/gpt@best:loss`, or any other selector.

    A checkpoint of a dcp.save has its own names. Of one that Holdfast saved a tensor's name is the component and its
    name in it, joined by a dot: `dcp.load({"model": model.state_dict()}, storage_reader=…)` finds the weights.

    Collective if torch.distributed is initialised: all ranks read the same checkpoint. For one load. Raises
    ConfigurationError, NoRestorePoint and IntegrityError; dcp.load loads in place, and after it raised the state may
    hold parts of the checkpoint.
    """
    return UrlReader(url)


def checkpoint_in(url: str) -> Place:
    """Raises ConfigurationError."""
    try:
        place = parse_place(url.removeprefix(_SCHEME))
    except SelectorError as error:
        raise ConfigurationError(f"{error}.") from None
    if not url.startswith(_SCHEME) or place.run is None or place.file is not None:
        raise ConfigurationError(f"{url!r} is not the URL of a checkpoint; write for example {_SCHEME}demo/gpt@latest.")
    return place


def dotted(layout: Layout) -> Layout:
    """With DCP's names: `model/up.weight` is `model.up.weight`. Unchanged if two tensors would have one name. Pure."""
    names = {name: name.replace("/", ".", 1) for name in layout.tensors}
    if len(set(names.values())) < len(names):
        return layout
    return Layout(
        layout.world_size,
        {
            names[name]: entry._replace(alias_of=None if entry.alias_of is None else names[entry.alias_of])
            for name, entry in layout.tensors.items()
        },
        tuple(
            shard._replace(pieces=tuple(piece._replace(tensor=names[piece.tensor]) for piece in shard.pieces))
            for shard in layout.shards
        ),
    )
