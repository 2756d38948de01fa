"""What this job reports of its attempt: heartbeats from rank 0, the crash of any rank, the end from rank 0.

A rank that raises reports at once, before its save in flight is drained and before its launcher ends the others,
because the errors of the others then follow from that one. The service keeps the first report.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import uuid
from collections.abc import Callable

from holdfast.errors import HoldfastError, ServiceUnavailable, StaleAttempt, TokenProblem
from holdfast.progress import ProgressReport
from holdfast.session.curve import MetricCurve
from holdfast.settings import TrainerSettings
from holdfast_client.client import Client
from holdfast_client.errors import UnsupportedProtocol
from holdfast_client.outcome_notes import OutcomeNote, write_note
from holdfast_protocol.attempts import AttemptOpened, EndAttempt, Heartbeat, Notice
from holdfast_protocol.base import Fence, RunName, text_to_keep
from holdfast_protocol.states import AttemptOutcome
from holdfast_protocol.text import without_secrets

log = logging.getLogger("holdfast")


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


ENDS_THE_JOB = (StaleAttempt, TokenProblem, UnsupportedProtocol)
"""Errors that no retry can fix. Whichever background thread meets one, the training thread raises it at its next
call."""

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
