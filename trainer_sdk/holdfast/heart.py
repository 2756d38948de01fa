"""What this job tells the service of its attempt: heartbeats from rank 0, the crash of any rank, the end from rank 0.

A rank that raises tells at once, before its save in flight is drained and before its launcher ends the others: whatever
the others meet then comes from that. The service keeps the first word.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.account import TrainingAccount
from holdfast.errors import HoldfastError, ServiceUnavailable, StaleAttempt, TokenProblem
from holdfast_client.client import Client
from holdfast_client.errors import UnsupportedProtocol
from holdfast_protocol.attempts import AttemptOpened, EndAttempt, Heartbeat, Notice
from holdfast_protocol.base import text_to_keep
from holdfast_protocol.fencing import Fence
from holdfast_protocol.redaction import without_secrets
from holdfast_protocol.selectors import RunName
from holdfast_protocol.states import AttemptOutcome

log = logging.getLogger("holdfast")

ENDS_THE_JOB = (StaleAttempt, TokenProblem, UnsupportedProtocol)
"""What no later try can mend. Wherever in the background it shows, the training thread raises it at its next call."""

_CRASH_SECONDS = 5.0
_LONGEST_DETAIL = 4000


class Heart:
    """`client`: one with little patience. `note`: takes what ends the job. `take_interval`: the recommended seconds
    between two saves, as each reply tells them."""

    def __init__(
        self,
        client: Client,
        run: RunName,
        rank: int,
        opened: AttemptOpened,
        account: TrainingAccount,
        *,
        fence: Fence,
        note: Callable[[BaseException], None],
        take_interval: Callable[[float], None],
    ) -> None:
        self._client = client
        self._run = run
        self._rank = rank
        self._opened = opened
        self._fence = fence
        self._account = account
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
        """Tells what this rank met; comes back within seconds, whatever the service does. Never raises."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        crash = self._word(AttemptOutcome.FAILED, f"{kind.__name__}: {error}").model_copy(
            update={"error_type": text_to_keep(name, 200), "error_rank": self._rank}
        )
        self._crash = crash
        self._telling = threading.Thread(target=self._tell, args=(crash,), name="holdfast-crash", daemon=True)
        self._telling.start()
        self._telling.join(_CRASH_SECONDS)

    def stop(self, outcome: AttemptOutcome, detail: str, notice: Notice | None, *, fenced: bool) -> None:
        """The heartbeat stops. Rank 0 tells how the job ended; who could not tell of a crash tries once more. A fenced
        one says nothing, for it would be refused. Never raises."""
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
        """The job goes on as another attempt: no more is told of this one, and being fenced ends nothing."""
        self._left = True
        self._stop.set()
        if self._beating is not None:
            self._beating.join(timeout=1.0)

    def _word(self, outcome: AttemptOutcome, detail: str) -> EndAttempt:
        return EndAttempt(
            **self._fence.model_dump(),
            **self._account.read(),
            outcome=outcome,
            detail=text_to_keep(without_secrets(detail), _LONGEST_DETAIL),
        )

    def _tell(self, word: EndAttempt) -> None:
        try:
            self._client.end_attempt(self._run.project, self._run.run, self._opened.attempt, word)
            self._told = True
        except StaleAttempt as error:
            self._note(error)
        except (HoldfastError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            log.warning("the service was not told that this attempt ended (%s); it will see so by its silence", error)

    def _beat(self) -> None:
        while not self._stop.wait(self._opened.heartbeat_interval_seconds):
            request = Heartbeat(
                **self._fence.model_dump(),
                **self._account.read(),
                steps_per_second=self._account.steps_per_second(),
            )
            try:
                reply = self._client.heartbeat(self._run.project, self._run.run, self._opened.attempt, request)
                self._take_interval(reply.save_interval_seconds)
            except ServiceUnavailable as error:
                log.info("a heartbeat was lost: %s", error)
            except ENDS_THE_JOB as error:
                if self._left:
                    return
                self._note(error)
                log.warning("the service does not take this attempt's heartbeat: %s", error)
                return
            except HoldfastError as error:
                # A gateway's page or a bug's reply may pass, and a heart that stops has the attempt taken for lost.
                log.warning("the service did not understand a heartbeat: %s", error)
