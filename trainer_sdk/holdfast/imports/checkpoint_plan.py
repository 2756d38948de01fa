"""The state of a source as one shard of a checkpoint: components, layout, documents, chunks on demand.

Flow: source_state -> **checkpoint_plan** -> steps. A checkpoint of one rank. Its components are those of a
job with the same state, under the same names: a state_dict is a model, and all else a value. So a restore,
load_weights() and `holdfast checkpoints pull` take it for one of Holdfast's own. All ranks share each component: any
world size loads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from holdfast.errors import StateError
from holdfast.imports.mapped_pages import give_back_pages
from holdfast.imports.source_state import SourceState, is_extra, is_model
from holdfast.layout.chunk_bytes import Runs, chunks_of, same_bytes
from holdfast.layout.plan import LocalPlan, PieceSpec, build_local_plan, global_layout
from holdfast.state.capture import TensorCollector
from holdfast.state.components import HF_FILES, Component, Declarations, Kind, check_keys
from holdfast.state.tensors import Held
from holdfast.state.tree import encode_tree
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.errors import ConfigurationError
from holdfast_protocol import checkpoints as wire
from holdfast_protocol.base import RunName
from holdfast_protocol.digests import DocumentError, chunk_digest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex

_HELD = Held(replicated=True)

OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class ImportPlan:
    """One checkpoint to be. `runs_of` gives the bytes of one tensor in the source, by its stored name."""

    local: LocalPlan
    layout: Layout
    trees: Mapping[str, Any]
    """[kind, typed tree] by component."""
    runs_of: Callable[[str], Runs]

    @property
    def tensor_bytes(self) -> int:
        return self.layout.tensor_bytes

    @property
    def chunk_bytes(self) -> int:
        """Those of the tensors' chunks."""
        return sum(self.local.shard.chunks)

    def tensor_chunks(self, on_bytes: OnBytes) -> Iterator[OutgoingChunk]:
        """Those of the tensors, by ordinal. `on_bytes` gets the size of each one that was read."""
        made = chunks_of(self.local.shard, lambda piece: self.runs_of(piece.tensor), in_place=True)
        for chunk, item_bytes in zip(made, self.local.item_bytes, strict=True):
            on_bytes(chunk.nbytes)
            yield OutgoingChunk(partial(_loaded, chunk), release=partial(give_back_pages, chunk), item_bytes=item_bytes)

    def documents(self, run: RunName, step: int) -> Iterator[OutgoingChunk]:
        """The index and the layout: the chunks after those of the tensors."""
        index = ShardIndex(
            SavedAs(str(run), step, world_size=1),
            rank=0,
            layout_digest=self.layout.digest,
            trees={},
            replicated_trees=self.trees,
        )
        return map(OutgoingChunk.of, (index.encode(), self.layout.encode()))

    def check_documents(self, run: RunName, step: int) -> None:
        """Before the first byte is sent. Raises ConfigurationError if no reader would take the index or the layout,
        because it is too large."""
        try:
            self.documents(run, step)
        except DocumentError as error:
            raise ConfigurationError(f"{error}. `--only` leaves components out.") from None

    @property
    def index_ordinals(self) -> wire.IndexOrdinals:
        first = len(self.local.shard.chunks)
        return wire.IndexOrdinals(shard=first, layout=first + 1)

    @cached_property
    def summary(self) -> wire.ShardSummary:
        stored = dict.fromkeys(self.trees, 0)
        for piece in self.local.shard.pieces:
            stored[self.layout.tensors[piece.tensor].component] += sum(segment.bytes for segment in piece.segments)
        return wire.ShardSummary(
            components={
                key: wire.Component(kind=_told_kind(key, kind), logical_bytes=stored[key])
                for key, (kind, _) in self.trees.items()
            }
        )

    def digests(self, run: RunName, step: int, on_bytes: OnBytes) -> list[str]:
        """Of every chunk, by ordinal: reads the whole source."""
        never = threading.Event()
        found = []
        for each in chain(self.tensor_chunks(on_bytes), self.documents(run, step)):
            found.append(chunk_digest(each.load(never)))
            if each.release is not None:
                each.release()
        return found


def _loaded(chunk: memoryview, stop: threading.Event) -> memoryview:
    return chunk


def _told_kind(key: str, kind: str) -> Any:
    return "model" if kind == Kind.MODULE else "optimizer" if key.startswith("optim") else "extra"


@dataclass(frozen=True)
class Choices:
    """What the user says of the components: all of them, under their own names, unless it is said."""

    only: frozenset[str] = frozenset()
    """Just these, by the source's names."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The source's names -> the checkpoint's."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The name of a tensor in the checkpoint -> that of the one which it is tied to. The source has both."""


def plan_import(source: SourceState, choices: Choices) -> ImportPlan:
    """Raises ConfigurationError for a name that is not there or not usable, for a tie of two values, and for a value
    that cannot be kept exactly."""
    only, renamed = choices.only, choices.renamed
    if unknown := sorted((only | renamed.keys()) - source.components.keys()):
        has = ", ".join(map(repr, source.components))
        raise ConfigurationError(f"It has no component {unknown[0]!r}. Its components are {has or 'none'}.")
    chosen = {renamed.get(key, key): value for key, value in source.components.items() if not only or key in only}
    if len(chosen) < len(only or source.components):
        raise ConfigurationError("Two of its components would have one name. Rename them apart.")
    try:
        check_keys(chosen)
        return _planned(_with_ties(chosen, choices.tied, source), source)
    except StateError as error:
        remedy = "`--rename OLD=NEW` renames a component, `--only` leaves the others out"
        raise ConfigurationError(f"{error}. {remedy}.") from None


def _with_ties(components: dict[str, Any], tied: Mapping[str, str], source: SourceState) -> dict[str, Any]:
    found = dict(components)
    for name, kept in tied.items():
        (key, _, fqn), (kept_key, _, kept_fqn) = name.partition("/"), kept.partition("/")
        model = found.get(key, {})
        if key != kept_key or not is_model(model) or not {fqn, kept_fqn} <= model.keys():
            raise ConfigurationError(f"No model of it has both {name!r} and {kept!r}, which are to be tied.")
        one, other = model[fqn], model[kept_fqn]
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not alike or not _same(source.runs_of(one), source.runs_of(other)):
            raise ConfigurationError(f"{name!r} and {kept!r} have different values, so they are not tied.")
        # The first of two names is the one that is stored.
        found[key] = {**{each: tensor for each, tensor in model.items() if each != fqn}, fqn: model[kept_fqn]}
    return found


def _same(one: Runs, other: Runs) -> bool:
    at = 0
    for part in other.arrays:
        if not same_bytes(one, at, part):
            return False
        at += part.size
    for part in (*one.arrays, *other.arrays):
        give_back_pages(part)
    return at == one.bytes


def _planned(components: Mapping[str, Any], source: SourceState) -> ImportPlan:
    specs: list[PieceSpec] = []
    trees: dict[str, Any] = {}
    live: dict[str, torch.Tensor] = {}
    for key, value in components.items():
        kind = _kind(key, value)
        collector = TensorCollector(Component(key, kind, None, replicated=True, rank=0, declared=Declarations()))
        trees[key] = [kind.value, _encoded(key, kind, value, collector)]
        specs += [piece.spec for piece in collector.pieces]
        live |= collector.live
    local = build_local_plan(specs, rank=0, world_size=1)
    return ImportPlan(local, global_layout([local]), trees, lambda name: source.runs_of(live[name]))


def _kind(key: str, value: Any) -> Kind:
    """That of the object with which a job has it: ModelFiles of integrations/hf_files.py is none of a plain value."""
    if is_model(value):
        return Kind.MODULE
    return Kind.STATEFUL if key == HF_FILES and isinstance(value, dict) and HF_FILES in value else Kind.VALUE


def _encoded(key: str, kind: Kind, value: Any, collector: TensorCollector) -> Any:
    name_tensor = partial(collector.add, held=_HELD)
    if kind is not Kind.MODULE:
        return encode_tree(value, path=f"{key}/", name_tensor=name_tensor)
    extras = {}
    for name, each in value.items():
        if is_extra(name):
            extras[name.removesuffix("_extra_state").removesuffix(".")] = each
        else:
            collector.add(f"{key}/{name}", each, _HELD)
    return encode_tree(extras, path=f"{key}/extra_state", name_tensor=name_tensor) if extras else None
