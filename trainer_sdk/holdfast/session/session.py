"""This job's part in its run: the attempt that rank 0 opened, its fencing token, its heartbeat, its end.

It is opened late, by the first restore() or save(): making a Checkpointer fences no other launch. Heartbeats come from
rank 0, the report of a crash from any rank, that of the end from rank 0. A rank that raises reports at once, before its
save in flight is drained and before its launcher ends the others, because the errors of the others then follow from
that one. The service keeps the first report.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from functools import cached_property

from pydantic import JsonValue

from holdfast.distributed.ranks import Ranks
from holdfast.errors import ENDS_THE_JOB, HoldfastError, NotRestored, ServiceUnavailable, StaleAttempt
from holdfast.local.adoption import Adoption
from holdfast.progress import ProgressReport
from holdfast.session.curve import MetricCurve
from holdfast.session.environment import environment
from holdfast.settings import TrainerSettings
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import AttemptConflict
from holdfast_client.host_calls import HostCalls
from holdfast_client.outcome_notes import OutcomeNote, write_note
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.attempts import AttemptOpened, EndAttempt, Heartbeat, Notice, OpenAttempt, ResumedFrom
from holdfast_protocol.base import Fence, RunName, text_to_keep
from holdfast_protocol.checkpoints import BeginCheckpoint
from holdfast_protocol.states import AttemptOutcome, CheckpointKind
from holdfast_protocol.text import without_secrets

log = logging.getLogger("holdfast")


# What is told of the attempt: to `holdfast launch`, and to the service.


class OutcomeFile:
    """Tells `holdfast launch` this rank's attempt and its outcome, in a folder of the launch.

    Without `holdfast launch` around the job there is no folder, and nothing is written."""

    def __init__(self, run: RunName, rank: int, settings: TrainerSettings) -> None:
        self._run = run
        self._rank = rank
        self._folder = settings.outcome_dir
        self._launch = settings.launch
        self._attempt = 0

    def new_launch_id(self) -> str:
        """One per process. It begins with the launch's own id, so that its attempts can be found in the catalog."""
        own = uuid.uuid4().hex
        return f"{self._launch}.{own}" if self._launch else own

    def opened(self, attempt: int) -> None:
        self._attempt = attempt
        self._write(None, "")

    def ended(self, outcome: AttemptOutcome, detail: str) -> None:
        self._write(outcome, detail)

    def _write(self, outcome: AttemptOutcome | None, detail: str) -> None:
        if self._folder is None:
            return
        note = OutcomeNote(
            project=self._run.project,
            run=self._run.run,
            attempt=self._attempt,
            rank=self._rank,
            outcome=outcome,
            detail=detail[:1000],
        )
        try:
            write_note(self._folder, note)
        except OSError as error:
            # The training goes on, and `holdfast launch` asks the catalog.
            log.warning("`holdfast launch` could not be told of this attempt (%s)", error.strerror or error)


_CRASH_SECONDS = 5.0
_LONGEST_DETAIL = 4000


class HeartbeatThread:
    """`client`: one that gives up soon. `note`: takes the error that ends the job. `take_interval`: takes the
    recommended seconds between two saves of each reply."""

    def __init__(
        self,
        client: Client,
        run: RunName,
        rank: int,
        opened: AttemptOpened,
        progress: ProgressReport,
        *,
        curve: MetricCurve,
        fence: Fence,
        note: Callable[[BaseException], None],
        take_interval: Callable[[float], None],
    ) -> None:
        self._client = client
        self._run = run
        self._rank = rank
        self._opened = opened
        self._fence = fence
        self._progress = progress
        self._curve = curve
        self._generation = curve.generation
        self._note = note
        self._take_interval = take_interval
        self._stop = threading.Event()
        self._told = False
        self._crash: EndAttempt | None = None
        self._left = False
        self._telling: threading.Thread | None = None
        self._beating: threading.Thread | None = None
        if rank == 0:
            self._beating = threading.Thread(target=self._beat, name="holdfast-heartbeat", daemon=True)
            self._beating.start()

    def crashed(self, error: BaseException) -> None:
        """Reports this rank's error; returns within seconds, whatever the service does, or within the client's deadline
        while the interpreter ends. Never raises."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        crash = self._word(AttemptOutcome.FAILED, f"{kind.__name__}: {error}").model_copy(
            update={"error_type": text_to_keep(name, 200), "error_rank": self._rank}
        )
        self._crash = crash
        telling = threading.Thread(target=self._tell, args=(crash,), name="holdfast-crash", daemon=True)
        try:
            telling.start()
        except RuntimeError:  # from Python 3.12 on, an interpreter that ends starts no thread
            self._tell(crash)
            return
        self._telling = telling
        telling.join(_CRASH_SECONDS)

    def stop(self, outcome: AttemptOutcome, detail: str, notice: Notice | None, *, fenced: bool) -> None:
        """Stops the heartbeat. Rank 0 reports how the job ended; a rank whose crash report failed tries once more. A
        fenced attempt reports nothing, because the service would refuse it. Never raises."""
        self._stop.set()
        if self._telling is not None:
            self._telling.join(1.0)
        if self._beating is not None:
            self._beating.join(timeout=1.0)
        if self._told or fenced:
            return
        if self._crash is not None:
            self._tell(self._crash)
        elif self._beating is not None:
            self._tell(self._word(outcome, detail).model_copy(update={"notice": notice}))

    def leave(self) -> None:
        """The job goes on as another attempt: this one tells what it has measured until now, reports no more, and its
        fencing ends nothing. Never raises."""
        self._left = True
        self._stop.set()
        if self._beating is not None:
            self._beating.join(timeout=1.0)
            self._curve.take_arrived()
            if self._curve.unsent():  # why the job goes back may be just that
                self._send_one()

    def _word(self, outcome: AttemptOutcome, detail: str) -> EndAttempt:
        self._curve.take_arrived()
        return EndAttempt(
            **self._fence.model_dump(),
            **self._progress.read(),
            metrics=self._curve.unsent(),
            outcome=outcome,
            detail=text_to_keep(without_secrets(detail), _LONGEST_DETAIL),
        )

    def _tell(self, word: EndAttempt) -> None:
        try:
            self._client.attempts.end(self._run.project, self._run.run, self._opened.attempt, word)
            self._told = True
            self._curve.sent(word.metrics, generation=self._generation)
        except StaleAttempt as error:
            self._note(error)
        except (HoldfastError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            log.warning("the service was not told that this attempt ended (%s); it will notice the silence", error)

    def _beat(self) -> None:
        while not self._stop.wait(self._opened.heartbeat_interval_seconds):
            try:
                goes_on = self._send_one()
            except Exception:  # of the script's log handler: without heartbeats the service takes the attempt for lost
                with contextlib.suppress(Exception):  # the hook may be the script's too
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            else:
                if not goes_on:
                    return

    def _send_one(self) -> bool:
        """False once the service takes no more of this attempt."""
        request = Heartbeat(
            **self._fence.model_dump(),
            **self._progress.read(),
            steps_per_second=self._progress.steps_per_second(),
            metrics=self._curve.unsent(),
        )
        try:
            reply = self._client.attempts.heartbeat(self._run.project, self._run.run, self._opened.attempt, request)
            self._curve.sent(request.metrics, reply.metrics_left_out, generation=self._generation)
            self._take_interval(reply.save_interval_seconds)
        except ServiceUnavailable as error:
            log.info("a heartbeat was lost: %s", error)
        except ENDS_THE_JOB as error:
            if not self._left:
                self._note(error)
                self._stop.set()
                log.warning("the service does not take this attempt's heartbeat: %s", error)
            return False
        except HoldfastError as error:  # a gateway's page or a bug's reply, which may pass
            log.warning("the service did not understand a heartbeat: %s", error)
        return True


# The attempt itself.

_BRIEF_SECONDS = 5.0


class Session:
    def __init__(
        self,
        client: Client,
        run: RunName,
        ranks: Ranks,
        *,
        create: bool | None,
        config: dict[str, JsonValue] | None,
        outcome_file: OutcomeFile,
        adoption: Adoption | None = None,
        after: int | None = None,
        before_open: Callable[[], object] | None = None,
    ) -> None:
        """`after`: the only attempt that may be fenced, 0 for none; open() raises AttemptConflict if another one is the
        newest. Without it, whichever is. `before_open`: called on every rank before the attempt is opened, and fences
        what older ones still send."""
        self.client = client
        self.brief_client = Client(client.settings.model_copy(update={"retry_seconds": _BRIEF_SECONDS}))
        """For reports that are useful but not worth waiting for."""
        self.run = run
        self.ranks = ranks
        self.progress = ProgressReport()
        self.curve = MetricCurve(takes=ranks.is_first)
        self.save_interval_seconds = math.inf
        """The save interval that the service recommends; known once the attempt is open."""
        self.may_save = False
        """This attempt has restored a checkpoint, or the run has none."""
        self.is_half_restored = False
        """A restore has written into the state, and none has ended well since."""
        self._had_begun = False
        """`has_begun`, when the job's own newer attempt was opened."""
        self._create = create
        self._config = config
        self._after = after
        # Made once per process: a call that is repeated after a lost reply opens no second attempt. Rank 0's is the
        # job's.
        self.launch_id = outcome_file.new_launch_id()
        self._next_launch_id: str | None = None
        self._own: int | None = None
        """The attempt that this one must follow directly."""
        self._may_be_left = False
        """open_anew() has failed, but the service may have carried it out. On every rank."""
        self._outcome_file = outcome_file
        self._opened: AttemptOpened | None = None
        self._before_open = before_open
        self._adoption = adoption
        """Work that is still to be done; every call of open() retries it until it has all succeeded."""
        self._ended_by: HoldfastError | None = None
        self._heartbeat: HeartbeatThread | None = None

    def open(self) -> AttemptOpened:
        """The attempt. At the first call rank 0 opens it and shares it, and the saves that older attempts left in the
        spool are committed. Collective at the first call. Every rank raises rank 0's error."""
        if self._opened is None:
            if self._before_open is not None:
                self._before_open()
            try:
                self.launch_id, self._opened = self.ranks.from_first(lambda: (self.launch_id, self._open_on_first()))
            except StaleAttempt as error:
                self._outcome_file.ended(AttemptOutcome.FENCED, str(error))
                raise
            self._is_open(self._opened)
        if self._adoption is not None:
            if self._adoption.adopt(self.fence):
                self._opened = self.ranks.from_first(self._choose_again)
            self._adoption = None
        return self._opened

    def go_on_after(self, own: int) -> None:
        """Opens directly after `own`, an attempt of this process that has ended: the state in memory goes on from
        there. Collective, in place of open(). Raises StaleAttempt on all ranks if another launch has taken over; that
        launch is not fenced."""
        self._own = own
        point = self.open().restore_point
        if point is not None:
            self.ranks.from_first(lambda: self.restored_from(point.checkpoint_id, rollback=False))
        self.has_whole_state()

    def open_anew(self) -> None:
        """Opens a new attempt for this same job, from which it may go back; it fences the job's old one. Collective; no
        save may be in flight. Nothing is saved in it until a restore has ended well: its first commit would cut the
        lineage without a parent.

        Raises StaleAttempt on all ranks if another launch has taken over. After any other error the old attempt goes
        on, unless the service has opened the new one and its reply was lost: then the service refuses the old attempt,
        though no other launch has taken over. A second call gets the attempt that was opened."""
        if self._heartbeat is not None:
            self._heartbeat.leave()
        try:
            launch_id, opened = self.ranks.from_first(self._open_after_own)
        except StaleAttempt as error:
            self._may_be_left = False
            self._ended_by = error
            self._outcome_file.ended(AttemptOutcome.FENCED, str(error))
            raise
        except BaseException:
            self._may_be_left = True
            self._beat(self.opened)
            raise
        self.launch_id, self._opened, self._next_launch_id = launch_id, opened, None
        if self._may_be_left and isinstance(self._ended_by, StaleAttempt):
            self._ended_by = None  # an error of the old attempt
        self._may_be_left = False
        self._had_begun, self.may_save = self.has_begun, False
        self.progress.begin()
        self.curve.begin()
        self._is_open(opened)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The facts of this launch, the same for all its attempts. For rank 0: finding them out takes seconds at
        most."""
        return environment(self.ranks.hosts)

    @property
    def has_begun(self) -> bool:
        """Whether this job may have staged or saved its state, or a restore has written into it."""
        return self.may_save or self.is_half_restored or self._had_begun

    @property
    def has_opened(self) -> bool:
        return self._opened is not None

    @property
    def opened(self) -> AttemptOpened:
        if self._opened is None:
            raise AssertionError("the attempt is opened before anything is written")
        return self._opened

    @property
    def fence(self) -> Fence:
        return Fence(epoch=self.opened.epoch, attempt=self.opened.attempt, launch_id=self.launch_id)

    def ready_to_save(self) -> None:
        """Opens the attempt if need be. Collective at the first call. Raises NotRestored if saving would leave existing
        checkpoints behind: no user means to train over them from the beginning. After a dcp.load that broke, some ranks
        may raise it and others not, so all ranks must hear of it before they save together."""
        if not self.may_save:
            if self.is_half_restored:
                raise NotRestored(f"The state holds parts of a checkpoint of {self.run} that could not be restored")
            if self.open().ever_committed:
                raise NotRestored(f"{self.run} has checkpoints, and attempt {self.opened.attempt} has not restored one")
            self.may_save = True

    def restored_from(self, checkpoint_id: str | None, *, rollback: bool) -> None:
        """Every rank has loaded this checkpoint, or found that the run has none. Rank 0 tells the service, and the
        lineage goes on from there. Not a collective; rank 0 alone raises errors."""
        self.tell_restored(checkpoint_id, rollback=rollback)
        self.has_whole_state()

    def tell_restored(self, checkpoint_id: str | None, *, rollback: bool) -> None:
        """The first half of restored_from(): rank 0 tells the service. From any thread."""
        if checkpoint_id is not None and self.ranks.is_first:
            self.client.attempts.resumed_from(
                self.run.project,
                self.run.run,
                self.opened.attempt,
                ResumedFrom(**self.fence.model_dump(), checkpoint_id=checkpoint_id, rollback=rollback),
            )

    def has_whole_state(self) -> None:
        """On every rank, once all ranks have loaded their whole state."""
        self.may_save, self.is_half_restored = True, False

    def begin_to_restore(self) -> None:
        """From here on the state is no longer what it was: nothing is saved until a restore has ended well."""
        self.may_save, self.is_half_restored = False, True

    def shard_writer(
        self,
        step: int,
        kind: CheckpointKind,
        workers: TransferWorkers,
        client: Client | None = None,
        host_calls: HostCalls | None = None,
        *,
        save_number: int | None = None,
    ) -> ShardWriter:
        """The writer of this rank's part of a checkpoint. Its first call begins it. `client`: one with another retry
        deadline. `save_number`: as BeginCheckpoint's."""
        begin = BeginCheckpoint(
            **self.fence.model_dump(),
            step=step,
            world_size=self.ranks.world_size,
            kind=kind,
            save_number=save_number,
        )
        return ShardWriter(
            client or self.client,
            self.run,
            self.ranks.rank,
            begin,
            workers=workers,
            brief_client=self.brief_client,
            host_calls=host_calls,
        )

    def note(self, error: BaseException) -> None:
        """A background thread met `error`; kept if it ends the job."""
        if isinstance(error, ENDS_THE_JOB) and self._ended_by is None:
            self._ended_by = self._ended_silently(error) or error

    def ended_by(self) -> HoldfastError | None:
        """The error that ends the job, if a background thread met one."""
        return self._ended_by

    def crashed(self, error: BaseException) -> None:
        """Reports this rank's `error` at once, before anything is waited for. Never raises."""
        self.note(error)
        if self._heartbeat is not None and not self._is_fenced:
            self._heartbeat.crashed(error)

    def end(self, outcome: AttemptOutcome, detail: str = "", notice: Notice | None = None) -> None:
        """Rank 0 reports how the job ended; the heartbeat stops. Never raises, because it comes when all else is
        done."""
        if self._heartbeat is not None:
            self._heartbeat.stop(outcome, detail, notice, fenced=self._is_fenced)
        if self._opened is not None:
            # Last: a launcher may end this process once it knows of the end.
            if self._is_fenced:
                outcome = AttemptOutcome.FENCED
            elif isinstance(self._ended_by, StaleAttempt) and outcome is AttemptOutcome.FINISHED:
                # The service refused its last save: it must be launched again, so it has not finished.
                outcome, detail = AttemptOutcome.FAILED, str(self._ended_by)
            self._outcome_file.ended(outcome, detail)
        self.brief_client.close()

    @property
    def _is_fenced(self) -> bool:
        """Another launch has the run: this job must not be launched again."""
        return isinstance(self._ended_by, StaleAttempt) and self._ended_by.is_fenced

    def _ended_silently(self, error: BaseException) -> StaleAttempt | None:
        """What to raise instead of `error`, if the newer attempt may be our own."""
        own = self._opened.attempt if self._opened is not None else 0
        if not self._may_be_left or not isinstance(error, StaleAttempt):
            return None
        if error.context.get("latest_attempt") != own + 1:
            return None
        return StaleAttempt(
            f"The reply to a rollback was lost, so attempt {own} of {self.run} may write no more. Launch the job again",
            request_id=error.request_id,
        )

    def _is_open(self, opened: AttemptOpened) -> None:
        self.save_interval_seconds = opened.save_interval_seconds
        self._outcome_file.opened(opened.attempt)
        self._beat(opened)

    def _beat(self, opened: AttemptOpened) -> None:
        self._heartbeat = HeartbeatThread(
            self.brief_client,
            self.run,
            self.ranks.rank,
            opened,
            self.progress,
            curve=self.curve,
            fence=self.fence,
            note=self.note,
            take_interval=self._take_interval,
        )

    def _open_after_own(self) -> tuple[str, AttemptOpened]:
        own = self.opened.attempt
        # Kept until it is known to be open: a lost reply and a second call must not fence each other.
        self._next_launch_id = self._next_launch_id or self._outcome_file.new_launch_id()
        return self._next_launch_id, self._open_right_after(own, self._next_launch_id, rolls_back=own)

    def _open_right_after(self, own: int, launch_id: str, *, rolls_back: int | None = None) -> AttemptOpened:
        request = OpenAttempt(
            launch_id=launch_id,
            after=own,
            world_size=self.ranks.world_size,
            host=socket.gethostname(),
            environment=self.environment,
            create=False,
            rolls_back=rolls_back,
            config=self._config,
        )
        try:
            return self.client.attempts.open(self.run.project, self.run.run, request)
        except AttemptConflict as error:
            raise StaleAttempt(
                f"Another launch has taken over {self.run} since this job was attempt {own}",
                request_id=error.request_id,
                context=error.context,
            ) from error

    def _take_interval(self, seconds: float) -> None:
        self.save_interval_seconds = seconds

    def _open_on_first(self) -> AttemptOpened:
        if self._own is not None:
            return self._open_right_after(self._own, self.launch_id)
        return self.client.attempts.open_next(
            self.run,
            self.launch_id,
            world_size=self.ranks.world_size,
            host=socket.gethostname(),
            environment=self.environment,
            create=self._create,
            config=self._config,
            after=self._after,
        )

    def _choose_again(self) -> AttemptOpened:
        """Asks again: the service chose the restore point when it opened the attempt, before late saves were
        adopted."""
        decision = self.client.restores.restore_point(self.run.project, self.run.run)
        return self.opened.model_copy(update=dict(decision))
