"""Imports one source after another as the steps of a run, and proves each before the next one begins.

    committed already, same digest -> skipped      else: upload and seal -> commit
                     `---------------------------------------------------> read back and compared with the source
    committed before, deleted since -> skipped, unless it came after all that is committed now

A kill at any moment leaves whole steps and at most one that is not committed, or committed and not yet compared. The
next import goes on there: it skips what is committed, compares the newest step again, and finds the chunks of the
unfinished one in the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from holdfast.distributed.ranks import Ranks
from holdfast.export.contents import Contents, read_contents
from holdfast.export.hf.model_files import as_component, read_names
from holdfast.imports.checkpoint_plan import Choices, ImportPlan, OnBytes, plan_import
from holdfast.imports.dcp_source import open_dcp_folder
from holdfast.imports.mapped_pages import give_back_pages
from holdfast.imports.safetensors_weights import open_safetensors
from holdfast.imports.source_state import MODEL, SourceState
from holdfast.imports.sources import Source, SourceFormat
from holdfast.imports.torch_file import open_torch_file
from holdfast.layout.chunk_bytes import Bytes, Runs, same_bytes
from holdfast.layout.reshard import Read, WantedPiece, plan_reads
from holdfast.progress import readable_bytes
from holdfast.restore.checkpoint_reader import CheckpointSource
from holdfast.session.session import OutcomeFile, Session
from holdfast.settings import TrainerSettings
from holdfast.state.components import HF_FILES
from holdfast_client import comparison
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import AttemptConflict, CheckpointAborted, ConfigurationError, IntegrityError, NotFound
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.digests import checkpoint_digest, shard_digest
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState, Health
from holdfast_protocol.text import printable

HELD_BYTES = 64 * 1024**2
"""Chunks that are hashed and not yet verified by the service, while a source is uploaded. One more may come."""
COMPARED_BYTES = 64 * 1024**2
"""Tensors that are compared together; a larger one alone."""
_BLOCK_BYTES = 8 * 1024**2
"""Of the source, in memory while a chunk that was read back is compared."""
_HASHED_AT_ONCE = 1
"""Of chunks. With two a slow store makes an import of 10 GB take 354 MB."""
_READ_BACK_AT_ONCE = 2
_CONFIG = "imported_from"
_OPTIMIZER_OF_TRAINER = "optimizer.pt"
_EVER_COMMITTED = (
    CheckpointState.COMMITTED,
    CheckpointState.TRASHED,
    CheckpointState.DELETING,
    CheckpointState.DELETED,
)

OnTotal = Callable[[int], object]
OnNote = Callable[[str], object]


def import_sources(
    client: Client,
    run: RunName,
    sources: Sequence[Source],
    *,
    choices: Choices,
    create: bool | None = None,
    on_total: OnTotal = lambda count: None,
    on_bytes: OnBytes = lambda count: None,
    on_note: OnNote = lambda note: None,
) -> dict[str, Any]:
    """Returns the report. `create`: as in OpenAttempt. `on_total` gets the bytes of all steps' chunks before one is
    read, `on_bytes` those of each chunk that was read, `on_note` a sentence when a step is done.

    Raises ConfigurationError for a source that cannot be imported and for a run that must not be written to;
    IntegrityError if what was read back is not the source, and whatever a save or a restore raises.
    """
    with _Import(client, run, create, printable(str(sources[0].path), one_line=True), on_bytes) as into:
        into.check(sources, on_note)
        sources = [into.as_committed(source, choices) for source in sources]
        # All are planned before the first is sent: one that cannot be imported is told now, and not after hours.
        on_total(sum(_checked_bytes(source, choices, run) for source in sources))
        steps = []
        for source in sources:
            plan = _plan_of(source, choices)
            steps.append(_step_report(source, plan, into.take(source, plan)))
            on_note(_told(steps[-1]))
    return {
        "run": str(run),
        **{name: sum(step[name] for step in steps) for name in ("tensors", "bytes", "sent_bytes", "present_bytes")},
        "steps": steps,
    }


def _checked_bytes(source: Source, choices: Choices, run: RunName) -> int:
    """Those of its chunks."""
    plan = _plan_of(source, choices)
    with _naming(source):
        plan.check_documents(run, source.step)
    return plan.chunk_bytes


def _plan_of(source: Source, choices: Choices) -> ImportPlan:
    with _naming(source):
        return plan_import(_with_model_files(_opened(source, choices.only), source), choices)


@contextmanager
def _naming(source: Source) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        told = str(error)
        raise error if str(source.path) in told else ConfigurationError(f"{source.path}: {told}") from None


def _opened(source: Source, only: frozenset[str]) -> SourceState:
    match source.format:
        case SourceFormat.TORCH:
            return open_torch_file(source.path)
        case SourceFormat.SAFETENSORS:
            return open_safetensors(source.path)
        case SourceFormat.DCP:
            return open_dcp_folder(source.path, only)


def _with_model_files(state: SourceState, source: Source) -> SourceState:
    """A model alone gets config.json and tokenizer beside it as a component: what was saved as a dict of several has
    keys of its own."""
    if not source.model_files or set(state.components) != {MODEL}:
        return state
    kept = as_component(read_names(source.path.parent, source.model_files))
    return dataclasses.replace(state, components={**state.components, HF_FILES: kept})


class _Taken(NamedTuple):
    view: CheckpointView
    skipped: bool
    sent_bytes: int = 0
    """Bytes of tensors."""

    @property
    def is_committed(self) -> bool:
        return self.view.state is CheckpointState.COMMITTED


def _step_report(source: Source, plan: ImportPlan, taken: _Taken) -> dict[str, Any]:
    return {
        "step": source.step,
        "source": str(source.path),
        "format": source.format.value,
        "checkpoint_id": taken.view.id,
        "skipped": taken.skipped,
        "deleted": not taken.is_committed,
        "components": sorted(plan.trees),
        "tensors": len(plan.layout.tensors),
        "tied": sum(entry.alias_of is not None for entry in plan.layout.tensors.values()),
        "bytes": plan.tensor_bytes,
        "sent_bytes": taken.sent_bytes,
        "present_bytes": plan.tensor_bytes - taken.sent_bytes if taken.is_committed else 0,
        "left_out": list(source.left_out),
        "model_files": list(source.model_files) if HF_FILES in plan.trees else [],
    }


class _Import:
    """Of one call. The attempt is opened by the first step that must be written: what is all there fences nobody."""

    def __init__(self, client: Client, run: RunName, create: bool | None, told: str, on_bytes: OnBytes) -> None:
        self._client = client
        self._run = run
        self._create = create
        self._told = told
        self._on_bytes = on_bytes
        self._session: Session | None = None
        self._workers = TransferWorkers(hashing=_HASHED_AT_ONCE)
        self._committed: dict[int, CheckpointView] = {}
        self._deleted: dict[int, CheckpointView] = {}
        """Committed before, and deleted since, by a policy or a person. Later steps are committed."""
        self._newest_attempt = 0
        """What `check` found. No other one is fenced."""

    def __enter__(self) -> _Import:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._session is not None:
            if error is not None:
                self._session.crashed(error)
            outcome = AttemptOutcome.FINISHED if error is None else AttemptOutcome.FAILED
            self._session.end(outcome, "" if error is None else f"{type(error).__name__}: {error}")
            self._session.ranks.close()
        self._workers.close()

    def check(self, sources: Sequence[Source], on_note: OnNote) -> None:
        """Before anything is read. Notes a step that may lack its comparison and is not among the sources. Raises
        ConfigurationError for a step that cannot come after the committed ones, and for a run that a training job has
        written to."""
        try:
            views = list(self._client.checkpoints.all(self._run.project, self._run.run, state=_EVER_COMMITTED))
            newest = self._client.attempts.list(self._run.project, self._run.run, limit=1).items
        except NotFound:  # the opening of the attempt makes it, or says why not
            return
        self._newest_attempt = newest[0].number if newest else 0
        self._committed = {view.step: view for view in views if view.state is CheckpointState.COMMITTED}
        last = max(self._committed, default=-1)
        self._deleted = {view.step: view for view in views if view.step < last and view.step not in self._committed}
        new = [source.step for source in sources if source.step not in self._committed | self._deleted]
        if not new:
            return
        if min(new) < last:
            raise ConfigurationError(
                f"Step {min(new)} cannot be imported after step {last}, which {self._run} has: steps follow each "
                "other. Import into another run; or leave it out, if it was imported and deleted long ago."
            )
        if newest and set(
            self._client.attempts.config(self._run.project, self._run.run, newest[0].number).config or {}
        ) != {_CONFIG}:
            raise ConfigurationError(
                f"Attempt {newest[0].number} of {self._run} is that of a training job, and an import would fence it. "
                "Import into a run of its own."
            )
        if last >= 0 and last not in {source.step for source in sources}:
            by = self._client.attempts.get(self._run.project, self._run.run, self._committed[last].attempt)
            if by.outcome is not AttemptOutcome.FINISHED:
                on_note(
                    f"step {last} is of an import that did not end well, and may not have been compared with its "
                    "source. Import it again, and that is done."
                )

    def as_committed(self, source: Source, choices: Choices) -> Source:
        """Without config and tokenizer, if its step was imported when these were not kept: its content is the same."""
        before = self._committed.get(source.step)
        if before is None or choices.renamed.get(HF_FILES, HF_FILES) in before.components:
            return source
        return dataclasses.replace(source, model_files=(), left_out=(*source.left_out, *source.model_files))

    def take(self, source: Source, plan: ImportPlan) -> _Taken:
        if (deleted := self._deleted.get(source.step)) is not None:
            self._on_bytes(plan.chunk_bytes)
            return _Taken(deleted, skipped=True)
        before = self._committed.get(source.step)
        if before is not None:
            self._refuse_another(before, plan)
            if source.step == max(self._committed):  # the import that committed it may have been killed since
                self._compare(before.id, plan)
            return _Taken(before, skipped=True)
        session = self._opened()
        writer = session.shard_writer(source.step, CheckpointKind.PERIODIC, self._workers)
        try:
            writer.upload(plan.tensor_chunks(self._on_bytes), held_bytes=HELD_BYTES)
            sent_bytes = min(writer.sent_chunk_bytes, plan.tensor_bytes)
            view = writer.upload_and_seal(
                plan.documents(self._run, source.step), lambda: (plan.summary, plan.index_ordinals)
            )
            if view.state is not CheckpointState.COMMITTED:
                raise CheckpointAborted(view.abort_reason or f"Step {source.step} was not committed")
        except BaseException as error:
            writer.fail(error)
            raise
        self._committed[source.step] = view
        self._compare(view.id, plan)
        return _Taken(view, skipped=False, sent_bytes=sent_bytes)

    def _opened(self) -> Session:
        if self._session is None:
            settings = TrainerSettings()
            ranks = Ranks(timeout_seconds=settings.collective_timeout_seconds)
            session = Session(
                self._client,
                self._run,
                ranks,
                create=self._create,
                config={_CONFIG: self._told},
                outcome_file=OutcomeFile(self._run, ranks.rank, settings),
                after=self._newest_attempt,
            )
            try:
                point = session.open().restore_point
            except AttemptConflict as conflict:
                raise ConfigurationError(
                    f"Another attempt of {self._run} was opened since this import began, and it would be fenced. "
                    "Import into a run of its own."
                ) from conflict
            self._session = session
            if session.opened.ever_committed:
                if (-1 if point is None else point.step) != max(self._committed, default=-1):
                    raise ConfigurationError(
                        f"The newest step of {self._run} cannot be restored now, so no step can follow it. "
                        f"`holdfast runs restore-point {self._run}` says why."
                    )
                session.restored_from(None if point is None else point.checkpoint_id, rollback=False)
        return self._session

    def _refuse_another(self, before: CheckpointView, plan: ImportPlan) -> None:
        is_last = before.step == max(self._committed)
        if before.health is Health.CORRUPT or (is_last and before.health is Health.QUARANTINED):
            remedy = "Import into another run"
            if is_last:
                remedy = f"Delete it (`holdfast checkpoints prune {self._run}@{before.step} --yes`) and import it again"
            raise ConfigurationError(f"Step {before.step} of {self._run} is {before.health.value}. {remedy}.")
        digests = plan.digests(self._run, before.step, self._on_bytes)
        if checkpoint_digest([shard_digest(digests)]) == before.digest:
            return
        # Another build of zlib gives the same documents other bytes: their content decides.
        stored = comparison.read_tensors(self._client, before, self._workers)
        tensors = len(plan.local.shard.chunks)
        if (stored.layout.digest, stored.values, stored.chunks[0][:tensors]) != (
            plan.layout.digest,
            comparison.tree_digests(plan.trees),
            digests[:tensors],
        ):
            raise ConfigurationError(f"{self._run} has another content at step {before.step}. Import into another run.")

    def _compare(self, checkpoint_id: str, plan: ImportPlan) -> None:
        """Reads every tensor as a restore does, with every chunk's digest checked, and compares it with the source, bit
        for bit. Raises IntegrityError, which names the first that differs."""
        point = self._client.restores.restore_point(self._run.project, self._run.run, checkpoint_id).restore_point
        if point is None:
            raise IntegrityError(f"{checkpoint_id} is committed, and the service does not offer it to a restore")
        with (
            TransferWorkers(_READ_BACK_AT_ONCE) as workers,
            CheckpointSource(self._client, self._run, point, workers=workers) as stored,
        ):
            contents = read_contents(stored)
            found = {unit.name: [unit.kind, unit.tree] for unit in contents.units}
            if contents.layout.digest != plan.layout.digest or found != plan.trees:
                raise IntegrityError(f"{checkpoint_id} describes other content than the source")
            for names in _groups(contents):
                entries = {name: contents.layout.tensors[name] for name in names}
                wanted = (
                    WantedPiece(name, each.dtype, (0,) * len(each.shape), each.shape) for name, each in entries.items()
                )
                in_source = {name: _InSource(plan.runs_of(name), checkpoint_id) for name in names}
                stored.read(plan_reads(contents.layout, wanted), contents.layout, contents.chunks, in_source)
                del in_source  # there may be no room for the tensors of two groups


class _InSource:
    """A tensor in its source, in the place of the tensor that is read back: what arrives is compared with it."""

    def __init__(self, runs: Runs, checkpoint_id: str) -> None:
        self._runs = runs
        self._checkpoint_id = checkpoint_id

    def take(self, read: Read, chunk: memoryview) -> None:
        """An import stores a tensor as one piece, so the elements of a read lie side by side."""
        begin, end = read.destination_offset, read.destination_offset + read.bytes
        arrived: Bytes = np.frombuffer(chunk, np.uint8)[read.chunk_offset : read.chunk_offset + read.bytes]
        for first in range(begin, end, _BLOCK_BYTES):
            last = min(first + _BLOCK_BYTES, end)
            if not same_bytes(self._runs, first, arrived[first - begin : last - begin]):
                raise IntegrityError(f"{read.name!r:.200} in {self._checkpoint_id} is not what the source has")
            for part in self._runs.between(first, last):
                give_back_pages(part)


def _groups(contents: Contents) -> Iterator[list[str]]:
    """The names of all tensors that have bytes, as they lie in the chunks."""
    group: list[str] = []
    total = 0
    for piece in contents.layout.shards[0].pieces:
        size = contents.layout.tensors[piece.tensor].total_bytes
        if group and total + size > COMPARED_BYTES:
            yield group
            group, total = [], 0
        group.append(piece.tensor)
        total += size
    if group:
        yield group


def _told(step: dict[str, Any]) -> str:
    if step["deleted"]:
        done = "was committed before, and has been deleted since: it is not imported again"
    elif step["skipped"]:
        done = "is there already, with the same content"
    else:
        done = f"is committed, and what was read back is the source ({readable_bytes(step['sent_bytes'])} sent)"
    if _OPTIMIZER_OF_TRAINER in step["left_out"]:
        done += ". It has the weights alone: begin a new run from them with load_weights()"
    kept = f" Kept with it: {', '.join(step['model_files'])}." if step["model_files"] else ""
    beside = f" Not imported: {', '.join(step['left_out'])}." if step["left_out"] else ""
    return f"{step['source']}: step {step['step']} {done}.{kept}{beside}"
