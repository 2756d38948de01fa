"""Takes notices, has all ranks leave after the same step, and minds the deadline. One thread per process.

    signal, cloud, another rank -> give_notice -> agreement: all leave after one step -> step() saves, raises Preempted
     \\-> this thread: no answer from a rank, no step in time, time is over

The training thread saves (emergency.py). If it never comes to the end of its step, the upload's own threads finish the
save in flight, and this thread ends the process before it is killed, so that the outcome is reported.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from holdfast.distributed.ranks import Ranks
from holdfast.distributed.step_agreement import Ask, Outlook, agreement_of
from holdfast.preemption.clouds.start import start_poller
from holdfast.preemption.notice import SIGTERM, Notice
from holdfast.preemption.signals import SignalWatch
from holdfast.settings import TrainerSettings
from holdfast_protocol import attempts as protocol
from holdfast_protocol.base import text_to_keep
from holdfast_protocol.states import AttemptOutcome

log = logging.getLogger("holdfast")

EXIT_PREEMPTED = os.EX_TEMPFAIL
"""If the training thread did not come back in time. Otherwise the script ends by its Preempted."""
EXIT_TERMINATED = 128 + signal.SIGTERM
"""A shell's code for a process that SIGTERM has ended, as it would be without us."""

RESERVE_SECONDS = 3.0
"""A save must be over this long before the deadline, for the report of the outcome and the script's own end."""
_LOOK_SECONDS = 0.1
_NOTICE_SECONDS = 0.5
_BROKEN_SECONDS = 2.0
"""A failed rank never answers: this long is left for a save in flight that is nearly done."""


class Standby(Protocol):
    """A state that is staged already, in case no step ends in time (standby_snapshot.py)."""

    def look(self, left_seconds: float, settle: Callable[[], bool]) -> None:
        """Uploads it if it is time to. Called repeatedly until the emergency save is settled."""

    def close(self) -> None:
        """No state is staged any more."""


class PreemptionWatch:
    """`wants`: as in agreement_of. `has_work()`: the attempt is open, so that there is something to save.
    `end(outcome, detail)`: reports how the job has ended, once."""

    def __init__(
        self,
        ranks: Ranks,
        settings: TrainerSettings,
        *,
        wants: Callable[[], bool],
        has_work: Callable[[], bool],
        end: Callable[[AttemptOutcome, str], None],
    ) -> None:
        self._settings = settings
        self._has_work = has_work
        self._end = end
        self._lock = threading.Lock()
        self._deadline_at = math.inf
        self._reserve_seconds = RESERVE_SECONDS
        self._is_terminated = False
        self._looks_for_an_answer = 0
        self._closing = False
        self._settled = False
        self._noticed = threading.Event()
        self._stop = threading.Event()
        self.notice: Notice | None = None
        """The first notice; later ones can only bring the deadline nearer."""
        self.said = "No step ended in time."
        """The newest state's outcome, for the attempt's record."""
        self.standby: Standby | None = None
        self.agreement = agreement_of(ranks, wants, lambda word: self._take(Notice.of(word)))
        self._thread = threading.Thread(target=self._run, name="holdfast-preemption", daemon=True)
        self._thread.start()
        self._signals = SignalWatch(settings.preemption_signal_numbers, self._signalled)
        self._poller = start_poller(
            ranks, settings, on_notice=self.give_notice, save_soon=lambda: self.agreement.request(Ask.SAVE)
        )

    def give_notice(self, notice: Notice) -> None:
        """From any thread of any rank: all ranks save and leave. Idempotent; the earliest deadline counts."""
        given_at = time.monotonic()
        self._take(notice)
        self.agreement.request(Ask.PREEMPT, notice.word(time.monotonic() - given_at))

    def _take(self, notice: Notice) -> None:
        now = time.monotonic()
        with self._lock:
            if notice.deadline_seconds is not None and now + notice.deadline_seconds < self._deadline_at:
                self._deadline_at = now + notice.deadline_seconds
                self._reserve_seconds = min(RESERVE_SECONDS, max(0.0, notice.deadline_seconds) / 4)
            self._is_terminated = self._is_terminated or notice.source == SIGTERM
            first = self.notice is None
            self.notice = self.notice or notice
        self._noticed.set()
        within = "" if notice.deadline_seconds is None else f", within {notice.deadline_seconds:.0f} s"
        with contextlib.suppress(Exception):  # of the script's log handler: no rank would hear of the notice
            if first:
                log.warning("this job is told to leave (%s%s): it saves after this step", notice, within)
            else:
                log.info("told again to leave (%s%s)", notice, within)

    def left_seconds(self) -> float:
        """Until a save must be over; infinite without a deadline."""
        with self._lock:
            return max(0.0, self._deadline_at - self._reserve_seconds - time.monotonic())

    def wait_seconds(self) -> float:
        """How long to wait for a save now: at most as long as the end of a job waits anyway."""
        return min(self.left_seconds(), self._settings.drain_seconds)

    def while_time_is_left(self, wait: Callable[[float], bool]) -> bool:
        """Waits as long as the end of a job may, but no longer than a notice that comes meanwhile allows. `wait(s)`:
        True once it is over."""
        until = time.monotonic() + self._settings.drain_seconds
        while (seconds := min(self.left_seconds(), until - time.monotonic())) > 0:
            if wait(min(seconds, _NOTICE_SECONDS)):
                return True
        return wait(0)

    @property
    def told(self) -> protocol.Notice | None:
        """The notice, for the attempt's record."""
        if self.notice is None:
            return None
        deadline = self.notice.deadline_seconds
        return protocol.Notice(
            source=text_to_keep(self.notice.source, 100),
            reason=text_to_keep(self.notice.reason, 1000),
            deadline_seconds=None if deadline is None else max(0.0, deadline),
        )

    def settle(self) -> bool:
        """Once, on rank 0: either the training threads have met and save, or the standby snapshot is uploaded. False
        for the later one."""
        with self._lock:
            settled, self._settled = not self._settled, True
            return settled

    def closing(self) -> None:
        """The end of the job has begun in order: the save in flight has the time that is left."""
        self._closing = True

    def close(self, *, in_order: bool) -> None:
        """After the last save. `in_order`: False if this rank has failed, so that the others need not wait for it."""
        self._signals.close()
        if self._poller is not None:
            self._poller.close()
        self.agreement.close(in_order=in_order)
        self._stop.set()
        self._noticed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _signalled(self, number: signal.Signals) -> None:
        self.give_notice(Notice(number.name, "a signal to this process", self._settings.grace_seconds_after(number)))

    def _run(self) -> None:
        self._noticed.wait()
        while not self._stop.wait(_LOOK_SECONDS):
            if (ending := self._ending()) is not None:
                self._leave(*ending)
                return
            if self.standby is not None:
                self.standby.look(self.left_seconds(), self.settle)

    def _ending(self) -> tuple[int, AttemptOutcome, str] | None:
        """How the process must end now, without its training thread."""
        if self._is_alone():
            why = "Not all ranks have answered after SIGTERM: one of them has ended."
            return EXIT_TERMINATED, AttemptOutcome.FAILED, why
        if not self._has_work() and self._may_end_now():
            return EXIT_TERMINATED, AttemptOutcome.PREEMPTED, "There is nothing to save yet."
        if time.monotonic() >= self._last_moment():
            return EXIT_PREEMPTED, AttemptOutcome.PREEMPTED, self.said
        return None

    def _is_alone(self) -> bool:
        """Whether a rank has crashed, and its launcher ends the others. Called in each round."""
        outlook = self.agreement.outlook
        if not self._is_terminated or self._closing or outlook not in (Outlook.OPEN, Outlook.BROKEN):
            return False
        # Counts polls, not seconds: a process that could not run for a while has not waited for the others.
        self._looks_for_an_answer += 1
        seconds = self._settings.preemption_agree_seconds
        if outlook is Outlook.BROKEN:
            seconds = min(seconds, _BROKEN_SECONDS)
        return self._looks_for_an_answer * _LOOK_SECONDS >= seconds or time.monotonic() >= self._last_moment()

    def _may_end_now(self) -> bool:
        # Another handler of SIGTERM ends the process in its own way.
        return self._is_terminated and not self._signals.has_earlier_handler(signal.SIGTERM)

    def _last_moment(self) -> float:
        with self._lock:
            return self._deadline_at - self._reserve_seconds / 2

    def _leave(self, code: int, outcome: AttemptOutcome, why: str) -> None:
        with contextlib.suppress(Exception):  # of the script's log handler
            log.warning("%s This process ends now, with exit code %d", why, code)
        with contextlib.suppress(Exception):  # the same, when the service could not be told
            self._end(outcome, f"{self.notice}. {why}")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        # The training thread is in a call that does not come back, so nothing gentler ends the process.
        os._exit(code)
