"""The way back: choose the point -> read documents -> plan -> fetch and verify -> all ranks agree -> apply -> RNG.

With `stream`, the state of optimizers is left to streamed_rest.py, and "all" below means all else.

Bytes arrive in the live tensors while they are hashed, wherever these can take them. No rank returns until every byte
of every rank was verified and all ranks said so; values that are no tensors, and RNG, come after that. If a checkpoint
turns out to be damaged, all ranks together take the one before it, which overwrites all of it. If none is left, the
state is unfit for training: the error says so, and nothing can be saved from it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.distributed.background_verdict import BackgroundVerdict
from holdfast.errors import ConfigurationError, NoRestorePoint, RanksDisagree
from holdfast.layout.reshard import ReadPlan, Room, plan_reads
from holdfast.progress import Phase, Progress, ProgressBoard, readable_bytes, readable_seconds
from holdfast.restore.checkpoint_reader import (
    DAMAGED,
    CheckpointSource,
    HostSharing,
    SharedDocuments,
    SharedReads,
    chunk_sizes,
    part_reads,
    read_documents,
)
from holdfast.restore.streamed_rest import NOT_TO_BE_TRAINED_ON, Rest, RestGate
from holdfast.session.environment import differences
from holdfast.session.session import Session
from holdfast.state.components import Declarations, derive_cuda_rng, derive_rng, restore_rng
from holdfast.state.destinations import Arrivals
from holdfast.state.load import LoadPlan, plan_load
from holdfast.state.on_device import OnDevice
from holdfast_client.chunks.documents import without_collections
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.restores import RestoreDecision, RestorePoint, Skipped
from holdfast_protocol.runs import SelectorError, parse_point
from holdfast_protocol.states import StoreRole
from holdfast_protocol.text import counted

if TYPE_CHECKING:
    from holdfast.compose import Parts
    from holdfast.dcp.reader import HoldfastReader


log = logging.getLogger("holdfast")


def tell_differences(session: Session, decision: RestoreDecision, written_by: int) -> None:
    """Logs the differences to the attempt that wrote the restore point, `written_by`. For rank 0.

    Another torch or GPU type may round otherwise; another commit may compute something else. Checkpoints exist to go on
    elsewhere, so nothing is refused for it, but it is never hidden."""
    if written_by == session.opened.attempt:
        return
    if decision.saved_with is None:
        log.info("what attempt %d ran with is not known, so nothing is compared", written_by)
        return
    for difference in differences(decision.saved_with, session.environment):
        log.warning("since attempt %d, which saved this, %s", written_by, difference)


@dataclass(frozen=True)
class _Planned:
    plan: LoadPlan
    reads: ReadPlan
    arrivals: Arrivals
    late: frozenset[str]
    """The tensors that can arrive after restore() has returned."""
    streams: bool
    """Some rank has any such: the same on all ranks."""


@dataclass(frozen=True)
class _Asked:
    """How a point is loaded."""

    rollback: bool
    is_named: bool = False
    declared: Declarations | None = None
    stream: bool = False


@dataclass(frozen=True)
class _Read:
    """One rank's bytes: of the `bytes`, `from_memory_bytes` were in its node agent's memory, `from_agents_bytes` in
    that of other hosts' agents, `from_host_bytes` on its host's disk, and `from_peers_bytes` came from other hosts'
    ranks; `from_stores`: fetched by store."""

    bytes: int
    from_memory_bytes: int
    from_agents_bytes: int
    from_host_bytes: int
    from_peers_bytes: int
    from_stores: dict[StoreRole, int]


class _Reading:
    """One rank's reading of one checkpoint, in one part or two."""

    def __init__(
        self,
        source: CheckpointSource,
        documents: SharedDocuments,
        planned: _Planned,
        shared: SharedReads | None,
    ) -> None:
        self.source = source
        self.documents = documents
        self.planned = planned
        self.shared = shared
        self.rooms: Mapping[str, Room] = {}

    def begin(self) -> None:
        self.rooms = self.planned.arrivals.rooms()

    def release(self) -> None:
        """All but the rest has arrived. The rest is read while training goes on."""
        self.rooms = {name: room for name, room in self.rooms.items() if name in self.planned.late}
        for room in self.rooms.values():
            if isinstance(room, OnDevice):
                room.leave_training_alone()


class Restorer:
    def __init__(
        self,
        session: Session,
        workers: TransferWorkers,
        *,
        declared: Declarations,
        sharing: HostSharing,
        progress: ProgressBoard,
        rest: RestGate,
    ) -> None:
        self._session = session
        self._rest = rest
        self._sharing = sharing
        self._progress = progress
        self._ranks = session.ranks
        self._workers = workers
        self._declared = declared

    def restore(
        self, state: dict[str, Any], at: str | None, *, skip_diverged: bool = True, stream: bool = False
    ) -> int:
        """Collective. The next step to run: 0 only if the service says that nothing was ever committed. After a rebuild
        of its catalog it may not know that, and raises CommitsUnknown until a person has confirmed it.

        `at` names one point, which is restored or raises; without it the newest that all ranks can read is taken.
        The error says so if the state is no longer what it was. `stream`: the state of optimizers may come later, to
        the RestGate.
        """
        return self._restoring(lambda: self._restore(state, at, skip_diverged=skip_diverged, stream=stream))

    def go_back(self, state: dict[str, Any], before_step: int | None, keep: frozenset[str]) -> int:
        """Collective, in a new attempt: loads the newest healthy point below `before_step`, without the components of
        `keep`. The lineage goes on from there."""
        return self._restoring(lambda: self._go_back(state, before_step, keep))

    def _restoring(self, work: Callable[[], int]) -> int:
        try:
            with self._session.progress.restoring():
                start = work()
        except BaseException as error:
            if self._session.is_half_restored and not isinstance(error, NoRestorePoint):
                error.add_note(NOT_TO_BE_TRAINED_ON)
            raise
        self._session.progress.goes_on_from(start)
        return start

    def _restore(self, state: dict[str, Any], at: str | None, *, skip_diverged: bool, stream: bool) -> int:
        # One rank alone may be half restored, by a dcp.load that broke there: all ranks refuse, or none.
        if at is not None and any(self._ranks.gather(self._session.may_save)):
            raise ConfigurationError(
                f"restore(at={at!r}) comes too late: this job has begun already. rollback(state, before=…) goes back "
                "in a running job; or launch it again."
            )
        if at is None and self._rest.before_step is not None:
            decision = self._before(self._rest.before_step, skip_diverged=skip_diverged)
        else:
            decision = self._decide(at, skip_diverged=skip_diverged)
        if at is not None and decision.restore_point is not None:
            named = _Asked(rollback=True, is_named=True, stream=stream)
            return self._restore_point(state, decision, decision.restore_point, named)
        newest = _Asked(rollback=False, stream=stream)
        loaded, decision = self._newest_readable(
            decision,
            lambda chosen, point: self._restore_point(state, chosen, point, newest),
            skip_diverged=skip_diverged,
        )
        if loaded is not None:
            return loaded
        if decision.ever_committed or at is not None:
            raise self._nothing_left(decision, at)
        if self._ranks.is_first:
            log.info("%s begins: nothing was ever committed in it", self._session.run)
        self._session.restored_from(None, rollback=False)
        return 0

    def _go_back(self, state: dict[str, Any], before_step: int | None, keep: frozenset[str]) -> int:
        wanted = {key: value for key, value in state.items() if key not in keep}
        asked = _Asked(rollback=True, declared=self._declared.without(keep))
        start, decision = self._newest_readable(
            self._before(before_step), lambda chosen, point: self._restore_point(wanted, chosen, point, asked)
        )
        if start is None:
            raise self._nothing_left(decision, None)
        state.update(wanted)  # puts the new plain values in place of the old
        return start

    def _newest_readable(
        self,
        decision: RestoreDecision,
        load: Callable[[RestoreDecision, RestorePoint], int],
        *,
        skip_diverged: bool = True,
    ) -> tuple[int | None, RestoreDecision]:
        """The next step to run, of the newest point that all ranks can read; None, and the last decision, if there is
        none."""
        if decision.note and self._ranks.is_first:
            log.warning("%s: %s", self._session.run, decision.note)
        while (point := decision.restore_point) is not None:
            try:
                return load(decision, point), decision
            except DAMAGED as error:
                # All ranks hold the same error, so all of them come here.
                decision = self._before(point.step, skip_diverged=skip_diverged)
                self._say_fallback(point, decision, error)
        return None, decision

    def choose(self, at: str | None) -> RestorePoint:
        """The first point that a restore would try. Collective. Raises NoRestorePoint if there is none."""
        decision = self._decide(at)
        if decision.restore_point is None:
            raise self._nothing_left(decision, at)
        return decision.restore_point

    def choose_before(self, step: int | None) -> RestorePoint:
        """The newest healthy point below `step`. Collective. Raises NoRestorePoint, with nothing changed."""
        decision = self._before(step)
        if decision.restore_point is None:
            raise self._nothing_left(decision, None if step is None else f"before step {step}")
        return decision.restore_point

    def _decide(self, at: str | None, *, skip_diverged: bool = True) -> RestoreDecision:
        again = self._session.has_opened
        opened = self._session.open()
        if at is None and not again and skip_diverged:
            return opened
        try:
            selector = str(parse_point(at or "latest"))
        except SelectorError as error:
            raise ConfigurationError(f"restore(at={at!r}) is not usable: {error}.") from None
        run = self._session.run
        return self._ranks.from_first(
            lambda: self._session.client.restores.restore_point(
                run.project, run.run, selector, diverged=not skip_diverged
            )
        )

    def _before(self, step: int | None, *, skip_diverged: bool = True) -> RestoreDecision:
        run = self._session.run
        return self._ranks.from_first(
            lambda: self._session.client.restores.restore_point(
                run.project, run.run, before_step=step, diverged=not skip_diverged
            )
        )

    def _restore_point(
        self, state: dict[str, Any], decision: RestoreDecision, point: RestorePoint, asked: _Asked
    ) -> int:
        began = time.monotonic()
        verdicts: list[BackgroundVerdict] = []
        with ExitStack() as held:
            on_host = held.enter_context(self._sharing.on_host())
            source = held.enter_context(
                CheckpointSource(self._session.client, self._session.run, point, workers=self._workers, host=on_host)
            )
            documents = read_documents(self._ranks, source, rank_trees=True)
            planned = self._plan_on_all(state, documents, asked)
            held.callback(planned.arrivals.let_go)
            # No rank leaves until all have read, because the folder that they share is deleted with the block.
            with ExitStack() as sharing:
                shared = sharing.enter_context(
                    self._sharing.of(planned.reads, documents.chunks, planned.late, on_host=on_host)
                )
                reading = _Reading(source, documents, planned, shared)
                first, rest = part_reads(planned.reads, documents.chunks, planned.late)

                def read_first() -> _Read:
                    reading.begin()
                    return self._read(reading, first, point.step)

                read = self._ranks.together(read_first)
                if planned.streams:
                    held.push(sharing.pop_all())

            def apply() -> bool:
                if planned.streams:
                    verdicts.append(self._rest.verdict())  # first: it is counted on all ranks, also if one fails here
                reading.release()
                if not planned.streams:
                    planned.plan.apply(planned.arrivals)
                else:
                    planned.plan.apply_first(planned.arrivals)
                return self._restore_rng(documents, point.step)

            self._session.begin_to_restore()
            other_devices = any(self._ranks.together(apply))
            if planned.streams:
                [verdict] = verdicts
                coming = self._rest_of(
                    reading, rest, verdict, state=state, point=point, asked=asked, held=held.pop_all()
                )
                self._rest.begin(coming, verdict)
        if not planned.streams:
            self._ranks.from_first(lambda: self._session.restored_from(point.checkpoint_id, rollback=asked.rollback))
            self._session.has_whole_state()
            self._rest.before_step = None
        if self._ranks.is_first:
            tell_differences(self._session, decision, point.attempt)
            log.info(
                "resumed %s from step %d%s: %s read and verified%s%s in %.1f s%s%s",
                self._session.run,
                point.step,
                self._derived_anew(documents, other_devices=other_devices),
                readable_bytes(sum(each.bytes for each in read)),
                _from_hosts(read),
                _from_others(each.from_stores for each in read),
                time.monotonic() - began,
                "; the state of optimizers is still read, and their first step waits for it" if planned.streams else "",
                _newer(decision.skipped),
            )
            _tell_parted(planned.plan.wants.parted)
        return point.step + 1

    def _rest_of(
        self,
        reading: _Reading,
        reads: ReadPlan,
        verdict: BackgroundVerdict,
        *,
        state: dict[str, Any],
        point: RestorePoint,
        asked: _Asked,
        held: ExitStack,
    ) -> Rest:
        return Rest(
            run=str(self._session.run),
            step=point.step,
            is_named=asked.is_named,
            state=state,
            slots=reading.planned.plan.late,
            arrivals=reading.planned.arrivals,
            read=lambda: self._read(reading, reads, point.step, verdict.show_life).bytes,
            stop_reading=reading.source.stop,
            tell=lambda: self._session.tell_restored(point.checkpoint_id, rollback=asked.rollback),
            held=held,
        )

    def _read(
        self, reading: _Reading, reads: ReadPlan, step: int, show_life: Callable[[], object] = lambda: None
    ) -> _Read:
        """This rank's part, verified. `show_life` is called with each chunk."""
        source, documents, shared = reading.source, reading.documents, reading.shared
        sizes = chunk_sizes(reads, documents.layout, documents.chunks)
        with self._progress.under_way(Phase.RESTORING, step, sum(sizes.values())) as meter:

            def arrived(count: int) -> None:
                show_life()
                self._say_progress(meter.advance(count))

            count = source.read(
                reads, documents.layout, documents.chunks, reading.rooms, shared=shared, on_bytes=arrived
            )
        host = None if shared is None else shared.host
        peers = None if host is None else host.peers
        agents = None if host is None else host.agents
        return _Read(
            count,
            0 if host is None else host.lent_bytes,
            0 if agents is None else agents.taken_bytes,
            0 if host is None else host.taken_bytes,
            0 if peers is None else peers.taken_bytes,
            source.bytes_from,
        )

    def _say_progress(self, progress: Progress | None) -> None:
        if progress is not None and self._ranks.is_first:
            log.info(
                "restoring %s from step %d: rank 0 has %s of %s, %s/s, time left %s",
                self._session.run,
                progress.step,
                readable_bytes(progress.bytes_done),
                readable_bytes(progress.bytes_total),
                readable_bytes(round(progress.bytes_per_second)),
                readable_seconds(progress.seconds_left),
            )

    def _plan_on_all(self, state: dict[str, Any], documents: SharedDocuments, asked: _Asked) -> _Planned:
        """This rank's reads, and where their bytes arrive. If one rank refuses, no rank's state has changed."""
        planned: list[_Planned] = []

        def plan() -> tuple[bool, bool, bool]:
            planned.append(self._plan(state, documents, asked))
            _, rest = part_reads(planned[0].reads, documents.chunks, planned[0].late)
            return planned[0].arrivals.touch_live_tensors, bool(rest.by_chunk), asked.stream

        told = self._ranks.together(plan)
        if len({stream for _, _, stream in told}) > 1:
            raise RanksDisagree("One rank restores with stream=True, and another without it")
        if any(touch for touch, _, _ in told):
            self._session.begin_to_restore()
        if any(has_rest for _, has_rest, _ in told):
            return replace(planned[0], streams=True)
        return replace(planned[0], late=frozenset())

    @without_collections()
    def _plan(self, state: dict[str, Any], documents: SharedDocuments, asked: _Asked) -> _Planned:
        plan = plan_load(
            state,
            documents.stored,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            declared=asked.declared or self._declared,
            stream=asked.stream,
        )
        reads = plan_reads(documents.layout, plan.wanted, prefer_rank=self._ranks.rank)
        return _Planned(plan, reads, plan.arrivals(into_live=True), plan.late_names, streams=False)

    def _restore_rng(self, documents: SharedDocuments, step: int) -> bool:
        """Last, because loading draws random numbers too. Returns whether this process sees another number of CUDA
        devices than the one that saved."""
        place = str(self._session.run), step, self._ranks.rank
        if documents.layout.world_size != self._ranks.world_size:
            derive_rng(*place, alike=documents.alike)
        elif documents.rng is not None and not restore_rng(documents.rng):
            derive_cuda_rng(*place)
            return True
        return False

    def _derived_anew(self, documents: SharedDocuments, *, other_devices: bool) -> str:
        if documents.layout.world_size == self._ranks.world_size:
            anew = "CUDA's random numbers derived anew from run, step and rank"
            return f" (saved with another number of visible CUDA devices: {anew})" if other_devices else ""
        alike = ", alike where they were" if documents.alike else ""
        return (
            f" (saved by {counted(documents.layout.world_size, 'rank')}, now {self._ranks.world_size}: resharded, and "
            f"random numbers derived anew from run, step and rank{alike})"
        )

    def _say_fallback(self, point: RestorePoint, decision: RestoreDecision, error: Exception) -> None:
        if self._ranks.is_first:
            following = decision.restore_point
            then = f"taking step {following.step} instead" if following else "and there is no earlier one"
            log.warning("step %d of %s cannot be restored, %s: %s", point.step, self._session.run, then, error)

    def _nothing_left(self, decision: RestoreDecision, at: str | None) -> NoRestorePoint:
        what = f"{self._session.run} has no restore point" + (f" {at!r}" if at else "")
        half = self._session.is_half_restored
        consequence = f". {NOT_TO_BE_TRAINED_ON}" if half else ", so nothing was loaded."
        reasons = " ".join(passed.detail for passed in decision.skipped[:3])
        return NoRestorePoint(
            f"{what}{consequence} {reasons} `holdfast checkpoints list {self._session.run}` lists what there is; "
            "to begin from nothing, choose the name of a new run"
        )


def _from_hosts(read: Sequence[_Read]) -> str:
    found = [
        f"{readable_bytes(count)} {what}"
        for count, what in (
            (sum(each.from_memory_bytes for each in read), "of it in the memory of the node agents"),
            (sum(each.from_agents_bytes for each in read), "of it in the memory of other hosts' agents"),
            (sum(each.from_host_bytes for each in read), "of it found on the hosts"),
            (sum(each.from_peers_bytes for each in read), "passed on from host to host"),
        )
        if count
    ]
    return f" ({', '.join(found)})" if found else ""


def _from_others(read: Iterable[dict[StoreRole, int]]) -> str:
    counted: Counter[StoreRole] = Counter()
    for from_stores in read:
        counted.update(from_stores)
    if not set(counted) - {StoreRole.PRIMARY}:
        return ""
    if len(counted) == 1:
        return f", from the {next(iter(counted))} store"
    parts = [f"{readable_bytes(counted[role])} from the {role} store" for role in StoreRole if role in counted]
    return f" ({', '.join(parts)}, documents among it)"


def _tell_parted(parted: Sequence[str]) -> None:
    if parted:
        log.warning(
            "%s%s shared memory with another tensor of the state, and is a copy of its own now, because the checkpoint "
            "has a value for each. Make it again after restore() if it shall follow the other",
            parted[0],
            f" (and {len(parted) - 1} more)" if len(parted) > 1 else "",
        )


def _newer(skipped: list[Skipped]) -> str:
    if not skipped:
        return ""
    shown = ", ".join(f"{passed.step} ({passed.reason})" for passed in skipped[:3])
    return f"; newer steps skipped: {shown}" + (" and more" if len(skipped) > 3 else "")


class Loading:
    """What `Checkpointer.restore`, `rollback` and `reader` do; their docstrings say what they promise."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def restore(
        self, state: dict[str, Any], at: str | None = None, *, skip_diverged: bool = True, stream: bool = False
    ) -> int:
        with self._parts.rest.make_way(state):
            if self._parts.session.has_begun:
                self._parts.pipeline.wait_idle(self._parts.ranks.timeout_seconds / 2)
            stream = stream and self._parts.recorder is None  # which looks at the whole state
            restore = self._parts.restorer.restore
            return self._loading(state, lambda: restore(state, at, skip_diverged=skip_diverged, stream=stream))

    def rollback(
        self,
        state: dict[str, Any],
        *,
        steps: int | None = None,
        before: int | None = None,
        skip_data: bool = False,
        keep: Iterable[str] = (),
    ) -> int:
        self._parts.rest.settle()
        if self._parts.standby is not None:
            self._parts.standby.forget()  # a snapshot of the old state, which the new attempt must not save
        back = self._parts.rollback.back
        return self._loading(
            state, lambda: back(state, steps=steps, before=before, keep=frozenset(keep), skip_data=skip_data)
        )

    def reader(self, at: str | None = None) -> HoldfastReader:
        from holdfast.dcp.reader import HoldfastReader

        self._parts.rest.settle()
        self._parts.saver.wait_for_copies()
        return HoldfastReader(
            self._parts.session, self._parts.workers, self._parts.restorer.choose(at), rollback=at is not None
        )

    def _loading(self, state: dict[str, Any], load: Callable[[], int]) -> int:
        # A launch that loads its first state has staged none yet, and no save of it was asked for.
        has_begun = self._parts.session.has_begun
        if has_begun:
            self._parts.saver.wait_for_copies()
        try:
            start = load()
        finally:
            if has_begun:
                self._parts.saver.forget_frozen()
            if self._parts.standby is not None:
                self._parts.standby.forget()
        if self._parts.recorder is not None:
            self._parts.recorder.restored(start, state)
        if self._parts.stats.last_committed_step is not None:
            # A step before the rollback does not count as saved, though a coming step may have its number.
            self._parts.stats.last_committed_step = start - 1
        self._parts.schedule.restored()
        if has_begun:
            self._parts.agreement.restart()
        return start
