"""The operation behind `holdfast checkpoints diff --values`: how far apart the tensors of two checkpoints are.

    both checkpoints under a lease -> their layouts, proven -> batches of what digests do not prove equal
      -> each batch: its chunks, verified -> sums for each tensor -> what is measured is kept in the operation's row
      -> the tensors of the largest relative change, and each component as a whole

A killed worker's operation goes on with the batch that it was at. What is read is known before: `dry_run` tells it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Self

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.comparison.tensors import StoredTensors
from holdfast_protocol.comparison.values import (
    CompareValues,
    ComponentMeasured,
    NotCompared,
    TensorMeasured,
    ValuesCompared,
)
from holdfast_protocol.digests import MAX_STORED_DOCUMENT_BYTES, canonical_bytes, parse
from holdfast_protocol.index_documents import SavedAs
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import OperationView
from holdfast_protocol.text import printable
from holdfast_service.auth.principal import Principal
from holdfast_service.comparisons.batches import Plan, Side, plan_batches
from holdfast_service.comparisons.read_batch import ChunkReader, Loaded, Opened, Target, read_batch
from holdfast_service.comparisons.sums import Sums
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Checkpoint, Project, Run
from holdfast_service.db.tables.operations import Operation
from holdfast_service.errors import ProblemError
from holdfast_service.operations.queue import OperationRun, start_operation
from holdfast_service.restore.service_reader import (
    SealedShard,
    end_leases,
    proven_layout,
    sealed_shards,
    take_lease,
)
from holdfast_service.runs.views import checkpoint_by_id, no_checkpoint, refuse_unless_whole

KIND = "compare"
MOST_UNDER_WAY = 2
"""Of one project, or of pairs from two projects: each reads as much as the process reads back at all."""


def start_comparison(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: CompareValues, *, key: str | None
) -> OperationView:
    """Raises `checkpoint_not_found` for either, what refuse_unless_whole raises, `invalid_request` for one checkpoint
    given twice, and `rate_limited` if too many are under way."""
    with context.database.transaction() as session:
        theirs, _, before = checkpoint_by_id(session, caller, request.against)
        ours, run, after = checkpoint_by_id(session, caller, checkpoint_id)
        for each in (before, after):
            refuse_unless_whole(each)
        if before.id == after.id:
            raise ProblemError(ProblemCode.INVALID_REQUEST, "Both are the same checkpoint. Name another one.")
        # Of two projects only who sees both may see the names of the tensors.
        within = theirs.id == ours.id
        session.execute(select(Project.id).where(Project.id == ours.id).with_for_update(key_share=True))
        started = start_operation(
            session,
            caller,
            KIND,
            project_id=ours.id if within else None,
            run_id=run.id if within else None,
            checkpoint_id=after.id,
            arguments=request.model_dump(mode="json"),
            key=key,
        )
        _refuse_crowd(session, ours if within else None)
        return started


def _refuse_crowd(session: Session, project: Project | None) -> None:
    of = None if project is None else project.id
    under_way = session.scalar(
        select(func.count()).where(
            Operation.kind == KIND, Operation.project_id.is_not_distinct_from(of), Operation.ended_at.is_(None)
        )
    )
    if (under_way or 0) > MOST_UNDER_WAY:
        whose = "of two projects" if project is None else f"of {project.name}"
        raise ProblemError(
            ProblemCode.RATE_LIMITED,
            f"{MOST_UNDER_WAY} comparisons {whose} are under way. `holdfast operations list --kind {KIND}` shows them: "
            "wait for one, or cancel it.",
        )


def run_comparison(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    """A ValuesCompared. Raises ProblemError if a checkpoint is not there, is cold, or has lost its documents, and
    StoreError if a store does not answer."""
    request = CompareValues.model_validate(run.arguments)
    assert run.checkpoint_id is not None  # start_comparison has named it
    run.progress(note="reads the layouts")
    in_slices = _Slices(context, run)
    with _opened(context, in_slices, request.against, run.checkpoint_id) as (reader, before, after):
        memory_bytes = context.settings.comparison_memory_bytes
        plan = plan_batches(before, after, memory_bytes=memory_bytes, working=in_slices)
        state = _State.of(run, plan)
        total = sum(plan.reads)
        if not request.dry_run:
            for number in range(state.batches, len(plan.batches)):

                def tell(read: int) -> None:
                    run.progress(done=state.read_bytes + read, total=total, note="reads what differs")

                for loaded in read_batch(reader, (before, after), plan.batches[number], tell):
                    state.take(loaded, request.most_tensors)
                state.batches, state.read_bytes = number + 1, state.read_bytes + plan.reads[number]
                run.progress(done=state.read_bytes, total=total, kept=state.kept())
    return _result(request, run.checkpoint_id, before, plan, state).model_dump(mode="json")


_SLICE_SECONDS = 0.02
_GIVES_WAY_SECONDS = 0.1


@dataclass
class _Slices:
    """Called again and again while a plan is made, which is Python for minutes, and perhaps in a process that answers
    jobs. It renews the lease, and while calls of jobs wait it works a sixth of the time."""

    context: ServiceContext
    run: OperationRun
    ends_at: float = 0.0

    def __call__(self) -> None:
        self.run.progress()
        if time.monotonic() >= self.ends_at:
            self.context.load.yield_to_callers(_GIVES_WAY_SECONDS, self.context.stopping)
            self.ends_at = time.monotonic() + _SLICE_SECONDS


@contextmanager
def _opened(
    context: ServiceContext, in_slices: _Slices, before_id: str, after_id: str
) -> Iterator[tuple[ChunkReader, Side, Side]]:
    run = in_slices.run
    found = context.database.run(partial(_open_both, context=context, run=run, ids=(before_id, after_id)))
    try:
        reader = ChunkReader(context, [each.opened for each in found])
        before, after = (_side(reader, at, each, in_slices) for at, each in enumerate(found))
        yield reader, before, after
    finally:
        end_leases(context, *(each.opened.lease_id for each in found))


@dataclass(frozen=True)
class _Found:
    opened: Opened
    saved_as: SavedAs
    digest: str | None
    shards: list[SealedShard]
    sizes: dict[str, int]


def _open_both(session: Session, *, context: ServiceContext, run: OperationRun, ids: tuple[str, str]) -> list[_Found]:
    opened = {each: _open(session, context, run, each) for each in sorted(ids)}  # in the order of all who lock several
    return [opened[each] for each in ids]


def _open(session: Session, context: ServiceContext, run: OperationRun, checkpoint_id: str) -> _Found:
    row = session.execute(
        select(Project, Run, Checkpoint)
        .join(Run, Run.project_id == Project.id)
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .where(Checkpoint.id == checkpoint_id)
        .with_for_update(read=True, key_share=True, of=Checkpoint)
    ).one_or_none()
    if row is None:
        raise no_checkpoint(checkpoint_id)
    project, found, checkpoint = row
    refuse_unless_whole(checkpoint)
    saved_in = found.name if checkpoint.forked_from is None else checkpoint.forked_from["saved_in"]
    shards, sizes = sealed_shards(session, checkpoint.id)
    return _Found(
        Opened(checkpoint.id, project.id, take_lease(session, context, run.id, checkpoint.id)),
        SavedAs(f"{project.name}/{saved_in}", checkpoint.step, checkpoint.world_size),
        checkpoint.digest,
        shards,
        sizes,
    )


def _side(reader: ChunkReader, at: int, found: _Found, in_slices: _Slices) -> Side:
    """Raises `chunk_gone` if its documents cannot be read."""

    def read(digests: Collection[str]) -> Mapping[str, bytearray]:
        sizes = {digest: found.sizes[digest] for digest in digests}
        documents = {digest: bytearray(size) for digest, size in sizes.items() if size <= MAX_STORED_DOCUMENT_BYTES}
        wanted = {digest: [Target(0, memoryview(into))] for digest, into in documents.items()}
        if damaged := reader.read(at, wanted, lambda _: in_slices()):
            raise ProblemError(
                ProblemCode.CHUNK_GONE,
                f"The chunk {min(damaged)[:12]} cannot be read: it says what is where in step {found.saved_as.step}. "
                "It is read again, and repaired if there is another copy; compare once more then.",
            )
        return documents

    layout = proven_layout(found.shards, found.sizes, read, found.digest, found.saved_as)
    tensors = StoredTensors(layout, {shard.rank: shard.chunks for shard in found.shards})
    return Side.of(tensors, found.sizes, in_slices)


@dataclass
class _Tensor:
    """What is measured of it so far. `same`: all these bytes were equal."""

    name: str
    sums: Sums = field(default_factory=Sums)
    same: bool = True
    damaged: bool = False

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Sorts what changed most to the front."""
        told = self.sums.told()
        change = told["relative_change"]
        other = (self.sums.nan_before, self.sums.infinite_before) != (self.sums.nan_after, self.sums.infinite_after)
        return (not (other or change is None), -(change or 0.0), self.name)


@dataclass
class _State:
    """All that is measured so far, as the operation's row keeps it. `plan`: its fingerprint. `batches`: how many of it
    are done."""

    plan: str
    batches: int = 0
    read_bytes: int = 0
    equal: int = 0
    differing: int = 0
    tensors: list[_Tensor] = field(default_factory=list)
    components: dict[str, tuple[int, Sums]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    begun: _Tensor | None = None
    """A tensor that goes on in the next batch."""

    def take(self, loaded: Loaded, most: int) -> None:
        from holdfast_service.comparisons.measures import measure

        subject = loaded.part.subject
        if self.begun is None:
            self.begun = _Tensor(subject.name)
        tensor = self.begun
        tensor.damaged |= loaded.damaged
        if not tensor.damaged:
            tensor.same &= loaded.before == loaded.after
            tensor.sums.add(measure(subject.entry.dtype, memoryview(loaded.before), memoryview(loaded.after)))
        if loaded.part.last < subject.rows:
            return
        self.begun = None
        if tensor.damaged:
            self.damaged.append(subject.name)
        elif tensor.same:
            self.equal += 1
        else:
            self.differing += 1
            count, sums = self.components.setdefault(subject.entry.component, (0, Sums()))
            sums.add(tensor.sums)
            self.components[subject.entry.component] = (count + 1, sums)
            self.tensors.append(tensor)
            if len(self.tensors) > 2 * most:
                self.cut(most)

    def cut(self, most: int) -> None:
        self.tensors = sorted(self.tensors, key=lambda tensor: tensor.rank)[:most]

    def kept(self) -> dict[str, Any]:
        begun = self.begun
        measured = {
            "tensors": [[tensor.name, astuple(tensor.sums)] for tensor in self.tensors],
            "components": [[name, count, astuple(sums)] for name, (count, sums) in self.components.items()],
            "damaged": self.damaged,
            "begun": None if begun is None else [begun.name, astuple(begun.sums), begun.same, begun.damaged],
        }
        return {
            "plan": self.plan,
            "counts": [self.batches, self.read_bytes, self.equal, self.differing],
            # As text, in ASCII: a tensor's name may hold what no database keeps.
            "measured": canonical_bytes(measured).decode(),
        }

    @classmethod
    def of(cls, run: OperationRun, plan: Plan) -> Self:
        """What an earlier try has kept; a new one if the settings cut other batches by now."""
        kept, fingerprint = run.kept, _fingerprint(plan)
        if kept is None or kept["plan"] != fingerprint:
            return cls(fingerprint)
        measured, (batches, read_bytes, equal, differing) = parse(kept["measured"].encode()), kept["counts"]
        begun = measured["begun"]
        return cls(
            fingerprint,
            batches,
            read_bytes,
            equal,
            differing,
            tensors=[_Tensor(name, Sums(*sums), same=False) for name, sums in measured["tensors"]],
            components={name: (count, Sums(*sums)) for name, count, sums in measured["components"]},
            damaged=measured["damaged"],
            begun=None if begun is None else _Tensor(begun[0], Sums(*begun[1]), *begun[2:]),
        )


def _fingerprint(plan: Plan) -> str:
    """The checkpoints do not change, so what a batch is depends on how they are cut alone."""
    cut = [[part.subject.name, part.last] for batch in plan.batches for part in batch]
    return hashlib.sha256(canonical_bytes([plan.reads, cut])).hexdigest()


def _result(request: CompareValues, after_id: str, before: Side, plan: Plan, state: _State) -> ValuesCompared:
    state.cut(request.most_tensors)
    entries = before.tensors.layout.tensors
    not_compared = sorted([*plan.not_compared.items(), *((name, "damaged") for name in state.damaged)])
    return ValuesCompared(
        before=request.against,
        after=after_id,
        bytes_to_read=sum(plan.reads),
        read_bytes=state.read_bytes,
        only_before=len(plan.diff.only_before),
        only_after=len(plan.diff.only_after),
        other_form=len(plan.diff.other_form),
        equal=len(plan.diff.equal) + state.equal,
        differing=plan.subjects if request.dry_run else state.differing,
        tensors=[
            TensorMeasured(
                name=printable(tensor.name),
                component=printable(entries[tensor.name].component),
                dtype=entries[tensor.name].dtype,
                shape=list(entries[tensor.name].shape),
                **tensor.sums.told(),
            )
            for tensor in state.tensors
        ],
        components=[
            ComponentMeasured(name=printable(name), tensors=count, **sums.told())
            for name, (count, sums) in sorted(state.components.items())
        ],
        not_compared=[
            NotCompared(name=printable(name), reason=reason) for name, reason in not_compared[: request.most_tensors]
        ],
        not_compared_left_out=max(0, len(not_compared) - request.most_tensors),
    )
