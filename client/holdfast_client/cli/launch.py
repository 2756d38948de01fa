"""`holdfast launch -- torchrun … train.py`: starts the job, forwards signals, and ends with a documented exit code."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast_client.agent.link import status_of
from holdfast_client.agent.process import LaunchedAgent, serves_at, socket_path
from holdfast_client.cli.arguments import connect
from holdfast_client.cli.output import ExitCode
from holdfast_client.cli.say import show_note
from holdfast_client.client import Client
from holdfast_client.errors import ConfigurationError, HoldfastError
from holdfast_client.outcome_notes import LAUNCH, OUTCOME_DIR, OutcomeNote, read_notes
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import SelectorError, parse_run
from holdfast_protocol.states import AttemptOutcome
from holdfast_protocol.text import counted

launch = typer.Typer(rich_markup_mode=None)


PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that the SDK takes as a notice. SIGINT is a person's, and no reason to launch again."""

_TORCHRUN = re.compile(r"(^|[\s/])torchrun(\s|$)")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_HANDLED_BY_TORCHRUN = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def is_torchrun(command: Sequence[str]) -> bool:
    """Whether torchrun's agent is in the child: also behind numactl, in a shell's `-c`, or within accelerate."""
    for word, after in itertools.pairwise(command):
        if word == "-m" and after in _TORCHRUN_MODULES:
            return True
        if word.rpartition("/")[2] == "accelerate" and after == "launch":
            return True
    return any(_TORCHRUN.search(word) for word in command)


def environment_of_child(
    environment: Mapping[str, str], launch: str, outcome_dir: str, grace_seconds: int
) -> dict[str, str]:
    """The child's environment; the user's own values stay."""
    defaults = {
        # A restart on gloo that finds the agent's store as it was joins the dead ranks' rendezvous.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_seconds),
        # A little less: the signal takes a moment to reach the ranks.
        "HOLDFAST_PREEMPTION_GRACE_SECONDS": str(grace_seconds - min(3.0, grace_seconds / 10)),
        # For signals that reach the agent directly: a batch system may send them to each process of a job.
        "PET_SIGNALS_TO_HANDLE": _HANDLED_BY_TORCHRUN,
    }
    return defaults | dict(environment) | {LAUNCH: launch, OUTCOME_DIR: outcome_dir}


def signal_for_child(number: int, *, torchrun: bool, already_asked: bool) -> int | None:
    """The signal to forward for one that came; None: none. For torchrun as in torch 2.13.

    torchrun's agent dies of SIGUSR1 and SIGUSR2 and leaves its workers behind. It forwards a SIGTERM, waits, kills the
    rest, and ends. It waits 30 seconds unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise, and a second signal during
    that wait breaks it off. Any other launcher gets its signals unchanged."""
    if not torchrun or number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        return number
    return None if already_asked else signal.SIGTERM


def is_preemption(number: int, *, torchrun: bool) -> bool:
    return number in PREEMPTION_SIGNALS or (torchrun and number == signal.SIGUSR2)


TICK_SECONDS = 0.5

_SENT_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_KILL_ROUNDS = 3
_PR_SET_CHILD_SUBREAPER = 36
_FROM_THE_TERMINAL = 0x80  # SI_KERNEL: the terminal has sent it to all of its foreground processes, the child too


class Child:
    """The job's launcher as a child: started, signalled, waited for. `code` is None while it runs, then its exit
    status, or minus the signal that ended it. Signals are read one by one from the kernel, so that none comes before
    there is a child to forward it to."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises ConfigurationError if it cannot be started."""
        # A terminal's foreground group has the keyboard, so the child stays in it. Without a terminal it gets a group
        # of its own: batch systems signal groups, and torchrun must not get a signal that kills it.
        self._shares_terminal = sys.stdin is not None and sys.stdin.isatty()
        _become_parent_of_orphans()
        # Of the shell whose place this process has taken.
        self._others = frozenset(_family_of([]))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._taken = {number for number in _SENT_ON if signal.getsignal(number) is not signal.SIG_IGN}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._taken, signal.SIGCHLD})
        group: dict[str, Any] = {} if self._shares_terminal else {"setpgroup": 0}
        try:
            self._pid = os.posix_spawnp(
                command[0],
                list(command),
                dict(environment),
                setsigmask=before,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these, and no other program expects that
                **group,
            )
        except OSError as error:
            raise ConfigurationError(
                f"{command[0]} cannot be started ({error.strerror}). Write the command after `--` as you would type it."
            ) from None
        self.code: int | None = None

    def wait(self, on_signal: Callable[[int], None], on_tick: Callable[[], None]) -> int:
        """Returns when the child has ended. `on_signal` gets each signal to forward; `on_tick` is called twice a
        second. The signals stay blocked: a late one must not replace the exit code."""
        while self.code is None:
            info = signal.sigtimedwait({*self._taken, signal.SIGCHLD}, TICK_SECONDS)
            if info is None:
                on_tick()
            elif info.si_signo != signal.SIGCHLD and not (self._shares_terminal and info.si_code == _FROM_THE_TERMINAL):
                on_signal(info.si_signo)
            self._reap()
        return self.code

    def send(self, number: int) -> None:
        """To the child alone, not to its group: a data loader's workers must live for the step to end."""
        if self.code is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        """Kills the child, its group (a terminal's group is ours too, and stays), and all that descends from it:
        torchrun starts each rank in a session of its own. After the child's end, those that it has left."""
        for _ in range(_KILL_ROUNDS):  # what one of them starts between the look and the kill is seen in the next
            family = _family_of([] if self.code is not None else [self._pid], self._others)
            for pid in family:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        # All of them: we are the parent of orphans too.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self.code = os.waitstatus_to_exitcode(status)


def _become_parent_of_orphans() -> None:
    """Of the job's: what outlives its parent is found by `_family_of` all the same. Linux has it, others do without."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _family_of(children: list[int], others: Collection[int] = ()) -> list[int]:
    """These children of ours and any more but `others`, their descendants, and what else is in their groups or
    sessions. Parents come before their children, so that none starts anew what is killed."""
    parents: dict[int, list[int]] = {}
    groups: dict[int, list[int]] = {}
    sessions: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is hidden from us
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            for members, leader in zip((parents, groups, sessions), fields[1:4], strict=True):
                members.setdefault(int(leader), []).append(int(folder.name))
    family = [pid for pid in dict.fromkeys([*children, *parents.get(os.getpid(), [])]) if pid not in others]
    for pid in family:  # it grows
        family += parents.get(pid, [])
    # Only a session's or a group's leader has its number: ours, which the child may be in, is not among these.
    beside = [pid for led in family for pid in [*groups.get(led, []), *sessions.get(led, [])]]
    return list(dict.fromkeys([*family, *beside]))


Asked = tuple[AttemptOutcome | None, str]
"""The catalog's outcome of an attempt, and a detail."""

_GRAVEST_FIRST = (
    AttemptOutcome.FENCED,
    AttemptOutcome.PREEMPTED,
    AttemptOutcome.FAILED,
    AttemptOutcome.LOST,
    None,
    AttemptOutcome.FINISHED,
)
_ASK_AGAIN_SECONDS = 1.0
_LATELY = 20
"""Attempts of other launches that may have been opened since."""


@dataclass(frozen=True)
class Outcome:
    """How the last attempt of one run ended. `outcome` is None if it is unknown."""

    run: RunName
    attempt: int
    outcome: AttemptOutcome | None
    detail: str = ""


def outcome_of_launch(
    notes: Sequence[OutcomeNote], ask: Callable[[RunName, int], Asked | None], retry_deadline_seconds: float
) -> Outcome | None:
    """The gravest outcome of the launch's runs; None if no attempt was opened, so that Holdfast knows nothing of this
    job.

    Rank 0's note counts. If rank 0 is on another node, the catalog has its outcome; if the service is unavailable too,
    the notes of this node's ranks must do. `ask`: the catalog's outcome of an attempt; None if the service cannot be
    asked. It is repeated as long as rank 0, on another node, may still report.
    """
    runs = {note.run_name for note in notes}
    outcomes = [
        _of_run(run, [note for note in notes if note.run_name == run], ask, retry_deadline_seconds) for run in runs
    ]
    return min(outcomes, key=lambda found: _GRAVEST_FIRST.index(found.outcome), default=None)


def last_attempt(notes: Sequence[OutcomeNote]) -> list[OutcomeNote]:
    """This node's notes on the last attempt of one run. An attempt that was fenced before it had a number comes
    last."""
    number = max(note.attempt or 1 << 62 for note in notes)
    return [note for note in notes if (note.attempt or 1 << 62) == number]


def notes_from_catalog(client: Client, run: RunName, launch: str) -> list[OutcomeNote]:
    """The last attempt of this launch, if the ranks could leave no note, behind srun or in another container.
    HOLDFAST_RUN names the run to look up. Its outcome is asked for afterwards. Empty if there is none, or the service
    is unavailable."""
    try:
        newest_first = client.attempts.list(run.project, run.run, limit=_LATELY).items
    except HoldfastError:
        return []
    ours = (attempt.number for attempt in newest_first if attempt.launch_id.startswith(f"{launch}."))
    return [OutcomeNote(project=run.project, run=run.run, attempt=number, rank=-1) for number in ours][:1]


def catalog_of(client: Client) -> Callable[[RunName, int], Asked | None]:
    def ask(run: RunName, attempt: int) -> Asked | None:
        try:
            found = client.attempts.get(run.project, run.run, attempt)
        except HoldfastError:
            return None
        # Its own job rolled back, and its ranks here know of no later attempt: no other launch has the run.
        left = found.outcome is AttemptOutcome.FENCED and found.rolled_back_at is not None
        return AttemptOutcome.FAILED if left else found.outcome, found.outcome_detail or ""

    return ask


def _of_run(
    run: RunName,
    notes: Sequence[OutcomeNote],
    ask: Callable[[RunName, int], Asked | None],
    retry_deadline_seconds: float,
) -> Outcome:
    last = last_attempt(notes)
    attempt = last[0].attempt
    first = next((note for note in last if note.rank == 0), None)
    if attempt == 0 or (first is not None and first.outcome is not None):
        word = first or last[0]
        return Outcome(run, attempt, word.outcome, word.detail)
    # A rank 0 of this node has ended without a note: no other process will report for it soon.
    until = time.monotonic() + (0.0 if first is not None else retry_deadline_seconds)
    while (asked := ask(run, attempt)) is not None:
        outcome, detail = asked
        if outcome is not None:
            return Outcome(run, attempt, outcome, detail)
        if time.monotonic() >= until:
            break
        time.sleep(_ASK_AGAIN_SECONDS)
    told = [note for note in last if note.outcome is not None]
    word = min(told, key=lambda note: _GRAVEST_FIRST.index(note.outcome), default=last[0])
    return Outcome(run, attempt, word.outcome, word.detail)


_RESERVED = (ExitCode.PREEMPTED, ExitCode.UNKNOWN, ExitCode.FENCED)
_SIGNALLED = 128
"""A shell adds this to the number of the signal that ended a command."""


@dataclass(frozen=True)
class Ending:
    code: int
    what: str
    """One sentence for people."""


def ending_of(child: int, known: Outcome | None, *, asked_to_end: bool) -> Ending:
    """The exit code of `holdfast launch`. No I/O. `child`: its exit status, or minus a signal's number. `known`: None
    if no attempt was opened. `asked_to_end`: a preemption's signal was forwarded to it."""
    own = _SIGNALLED - child if child < 0 else child
    outcome = known.outcome if known is not None else None
    who = f"{known.run}, attempt {known.attempt}," if known is not None else "The job"
    if outcome is AttemptOutcome.FENCED:
        return Ending(ExitCode.FENCED, f"{who} has lost its run to another launch. Do not launch this one again.")
    if outcome is AttemptOutcome.PREEMPTED:
        return Ending(ExitCode.PREEMPTED, f"{who} was preempted. Launch it again.")
    if child == 0 and (known is None or outcome is AttemptOutcome.FINISHED):
        return Ending(ExitCode.OK, f"{who} has finished.")
    if asked_to_end:
        # Whatever ended it, the preemption caused it: a peer had gone first, or it came before its first step.
        return Ending(ExitCode.PREEMPTED, f"{who} was told to end before it had finished. Launch it again.")
    if known is None:
        return Ending(own, f"{who} ended with {_said(child)}, and had opened no attempt.")
    if outcome is None or outcome is AttemptOutcome.LOST:
        return Ending(ExitCode.UNKNOWN, f"{who} ended with {_said(child)}, and no rank has told how.")
    if outcome is AttemptOutcome.FAILED:
        # A failure is never 0, even if a script caught its exception, nor a code with a meaning of ours.
        code = ExitCode.FAILED if child == 0 or own in _RESERVED else own
        return Ending(code, f"{who} has failed: {' '.join(known.detail.split()) or _said(child)}.")
    code = ExitCode.FAILED if own in _RESERVED else own
    return Ending(code, f"{who} has finished, and its command ended with {_said(child)} afterwards.")


def _said(child: int) -> str:
    return f"signal {-child}" if child < 0 else f"status {child}"


_RUN = "HOLDFAST_RUN"
_DO_NOT_RESTART = (AttemptOutcome.FENCED, AttemptOutcome.PREEMPTED)
_LEFT_TIME_SECONDS = 1.0
"""From the last rank's note to the end of its process."""
_STRAGGLERS_SECONDS = 10.0
_AFTER_GRACE_SECONDS = 5.0
"""torchrun kills ranks that are still there when the grace is over, and then ends."""
_CATALOG_SECONDS = 30.0
"""How long rank 0, on another node, has to tell the catalog once this node's part has ended."""
_CATALOG_SECONDS_LEAVING = 3.0
"""After a notice: this process is ended soon too, and the job is launched again in any case but one."""


@launch.command("launch", context_settings={"allow_interspersed_args": False})
def launch_job(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="For example torchrun … train.py.")],
    grace: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="How long the job has from a signal until it is killed: the batch system's own number. The ranks save "
            "within it, and torchrun waits for them so long.",
        ),
    ] = 30,
    agent: Annotated[
        bool,
        typer.Option(
            "--agent",
            help="An agent of this node finishes the saves of ranks that are killed: the one that serves at "
            "HOLDFAST_AGENT, or one of this launch, which ends after the job within the grace.",
        ),
    ] = False,
) -> None:
    """Run a training job, and end with an exit code that a batch system can act on.

    0: finished. 75: preempted, launch it again. 76: no rank has told how it ended. 79: another launch has the run, do
    not launch this one again. Else the job's own. SIGTERM and SIGUSR1 reach its ranks as a notice to save and leave,
    under torchrun too. Processes that have not ended some seconds after the grace are killed.
    """
    # What cannot be removed, because a rank still writes there or ran as another user, must not replace the exit code.
    with tempfile.TemporaryDirectory(prefix="holdfast-launch-", ignore_cleanup_errors=True) as folder:
        job = _Job(command, Path(folder), grace, with_agent=agent)
        status = job.wait()
        job.end_agent()
        ending = ending_of(status, job.outcome(), asked_to_end=job.asked_to_end)
    show_note(f"holdfast launch: {ending.what} Exit code {ending.code}.")
    raise typer.Exit(ending.code)


def _stays(path: Path) -> bool:
    """Whether an agent serves there that does not end with another launch."""
    if not serves_at(path):
        return False
    try:
        return not status_of(path).of_launch
    except HoldfastError:
        return True  # it hangs, or is of another version


class _Job:
    def __init__(self, command: Sequence[str], folder: Path, grace_seconds: int, *, with_agent: bool) -> None:
        self.asked_to_end = False
        self._grace_until: float | None = None
        self._kill_at: float | None = None
        self._grace_seconds = grace_seconds
        self._folder = folder
        self._torchrun = is_torchrun(command)
        self._told_at: float | None = None
        self._launch = uuid.uuid4().hex
        environment = environment_of_child(os.environ, self._launch, str(folder), grace_seconds)
        self._agent: LaunchedAgent | None = None
        if with_agent:
            path = socket_path()
            environment["HOLDFAST_AGENT"] = str(path)
            self._agent = None if _stays(path) else LaunchedAgent(path, grace_seconds)
        self._child = Child(command, environment)

    def wait(self) -> int:
        status = self._child.wait(self._send_on, self._reconcile)
        if status < 0 and self._torchrun and not self.asked_to_end:
            # Something else has killed the agent, as the kernel does when memory is short: nobody would end its ranks.
            self._child.kill()
        return status

    def end_agent(self) -> None:
        """After the job: what its dead ranks have left has the grace, of which a notice may have begun already."""
        if self._agent is None:
            return
        until = self._grace_until or time.monotonic() + self._grace_seconds
        code = self._agent.end(max(0.0, until - time.monotonic()) + _AFTER_GRACE_SECONDS)
        if code != ExitCode.OK:
            show_note("holdfast launch: The agent could not finish in time what killed ranks have left, or has failed.")

    def outcome(self) -> Outcome | None:
        """How the job ended; None if it opened no attempt."""
        notes = read_notes(self._folder)
        retry_deadline_seconds = _CATALOG_SECONDS_LEAVING if self.asked_to_end else _CATALOG_SECONDS
        run = os.environ.get(_RUN)
        if not notes and not run:
            return None
        try:
            with connect() as client:
                if not notes and run:
                    notes = notes_from_catalog(client, parse_run(run), self._launch)
                return outcome_of_launch(notes, catalog_of(client), retry_deadline_seconds)
        except (HoldfastError, SelectorError):
            # A setting is wrong, so the service cannot be asked.
            return outcome_of_launch(notes, lambda _run, _attempt: None, retry_deadline_seconds)

    def _send_on(self, number: int) -> None:
        translated = signal_for_child(number, torchrun=self._torchrun, already_asked=self.asked_to_end)
        if is_preemption(number, torchrun=self._torchrun) and not self.asked_to_end:
            self.asked_to_end = True
            self._grace_until = time.monotonic() + self._grace_seconds
            self._kill_at = self._grace_until + _AFTER_GRACE_SECONDS
        if translated is not None:
            self._child.send(translated)

    def _reconcile(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            show_note(
                "holdfast launch: The job was told to end, and has not within "
                f"{counted(self._grace_seconds, 'second')} (--grace) and {_AFTER_GRACE_SECONDS:.0f} more. It is killed."
            )
            self._child.kill()
        if self._torchrun:
            self._stop_restarts()

    def _stop_restarts(self) -> None:
        """torchrun takes a rank that leaves for a crash and restarts its workers (--max-restarts): on a machine that is
        about to be taken away, or against the launch that has taken over. Once the ranks have left their notes, it is
        ended."""
        if self.asked_to_end:
            return
        notes = read_notes(self._folder)
        told = [
            [note.outcome for note in last_attempt([note for note in notes if note.run_name == run])]
            for run in {note.run_name for note in notes}
        ]
        leaving = [outcomes for outcomes in told if any(outcome in _DO_NOT_RESTART for outcome in outcomes)]
        if not leaving:
            self._told_at = None
            return
        self._told_at = self._told_at or time.monotonic()
        all_told = all(outcome is not None for outcomes in leaving for outcome in outcomes)
        if time.monotonic() - self._told_at >= (_LEFT_TIME_SECONDS if all_told else _STRAGGLERS_SECONDS):
            self._send_on(signal.SIGTERM)
