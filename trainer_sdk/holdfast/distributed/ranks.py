"""The only collectives. Every agreement between the ranks goes through here, on a gloo group of our own.

Called from the training thread (or by stand_in in its place), at the same places on all ranks: opening the attempt,
each restore candidate, and two small votes per save. The background half of a save calls none of this. The group is our
own because the job's may be NCCL (it would need device memory and could be mid-kernel), and has another time-out. Works
the same for one process without torch.distributed.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from holdfast.errors import ConfigurationError, HoldfastError, RankLost, RanksDisagree
from holdfast_client.errors import rebuild_error

T = TypeVar("T")

_NO_DIGEST = "0" * 64


class Question(IntEnum):
    """The subject of a vote: ranks that vote on different questions at once must notice, and not count each other."""

    SAVE = 0
    IS_BEST = 1
    IS_DIVERGED = 2


@dataclass(frozen=True)
class Ballot:
    """One rank's part in the vote on one save."""

    step: int
    busy: bool
    """An earlier save of this rank is still in flight."""
    failed: bool
    """This rank could not capture its state."""
    layout_digest: str | None
    """The agreed layout, if this rank's plan is still part of it; None asks for a new one."""
    question: Question = Question.SAVE
    yes: bool = False
    """This rank's answer, if the question has one."""


@dataclass(frozen=True)
class Verdict:
    """The result of all the ranks' ballots; the same on every rank."""

    busy: bool
    failed: bool
    same_layout: bool
    yes: bool
    """Whether any rank has said so."""


class KeyValueStore(Protocol):
    """The part of the job's store (torch.distributed.Store) that background threads use."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True)
class Failure:
    """An exception in a form that can be sent to another rank by pickle, whatever its constructor takes."""

    kind: type[Exception]
    message: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        facts = {name: value for name, value in vars(error).items() if not name.startswith("__")}
        failure = cls(type(error), str(error), facts)
        try:
            pickle.dumps(failure)
        except Exception:  # whatever a foreign exception carries, its message must arrive
            return cls(RuntimeError, f"{type(error).__name__}: {error}", {})
        return failure

    def rebuild(self, rank: int) -> Exception:
        return rebuild_error(self.kind, (f"On rank {rank}: {self.message}",), self.facts)


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    failure: Failure | None


class Ranks:
    """`rank` and `world_size` of this process, and what the ranks do together."""

    def __init__(self, *, timeout_seconds: float, swarms: bool = False) -> None:
        """Makes the group; all ranks must call it. `swarms`: this rank passes chunks on to other hosts. Raises
        ConfigurationError if a launcher made a world without torch.distributed: each process would take itself for the
        only one."""
        self.timeout_seconds = timeout_seconds
        self._group: dist.ProcessGroup | None = None
        self._turn = threading.RLock()
        self._raised: Exception | None = None
        self.collectives = 0
        """How many collectives this rank has taken part in."""
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        else:
            self.rank, self.world_size = 0, 1
            launched = os.environ.get("WORLD_SIZE", "1")
            if launched != "1":
                raise ConfigurationError(
                    f"WORLD_SIZE is {launched}, and torch.distributed is not initialised. "
                    "Call torch.distributed.init_process_group() before holdfast.Checkpointer(…)."
                )
        told = self.gather(((socket.gethostname(), _boot_id()), uuid.uuid4().hex, secrets.token_hex(32), swarms))
        hosts = [host for host, *_ in told]
        self.hosts = frozenset(name for name, _ in hosts)
        """The hosts of all ranks, by name."""
        lowest = {host: rank for rank, host in reversed([*enumerate(hosts)])}
        self.host_leaders = tuple(lowest[host] for host in hosts)
        """For each rank the lowest rank on its host, which stands for the host."""
        self.host_ranks = tuple(rank for rank, host in enumerate(hosts) if host == hosts[self.rank])
        """The ranks on this rank's host, this one included."""
        self.host_leader = self.host_leaders[self.rank]
        """The lowest rank on this rank's host."""
        self.host_secret = told[self.host_leader][2]
        """Hex that only the ranks of this job know; the same on all ranks of this host."""
        self.some_share = len(lowest) < len(hosts) or (len(hosts) > 1 and any(swarms for *_, swarms in told))
        """Some ranks are on one host, or pass chunks on from host to host. The same on all ranks."""
        # The launcher's store may hold keys of the job before its restart, and of other Checkpointers.
        self._store_prefix = f"holdfast/{told[0][1]}"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def store(self, purpose: str) -> KeyValueStore | None:
        """A new connection to the job's key-value store, for one background thread; None for a lone process.

        Each thread has its own, because a store's client lets one call through at a time. Not a collective.
        """
        if self._group is None:
            return None
        c10d: Any = dist.distributed_c10d
        store: KeyValueStore = c10d.PrefixStore(f"{self._store_prefix}/{purpose}", c10d._get_default_store().clone())
        return store

    def close(self) -> None:
        """Leaves the group. Not a collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def together(self, work: Callable[[], T]) -> list[T]:
        """Every rank does `work`; every rank gets all the results, in rank order, or every rank raises.

        All raise the error of the lowest failing rank, even ranks that met another error: they must all react alike,
        for example take an earlier restore point.
        """
        try:
            outcome: _Outcome[T] = _Outcome(work(), None)
            own: Exception | None = None
        except Exception as error:  # the others must hear of any failure, or they wait for this rank
            outcome, own = _Outcome(None, Failure.of(error)), error
        results: list[Any] = []
        for rank, other in enumerate(self.gather(outcome)):
            if other.failure is not None:
                raise own if own is not None and rank == self.rank else other.failure.rebuild(rank)
            results.append(other.value)
        return results

    def from_first(self, work: Callable[[], T]) -> T:
        """Rank 0 does `work`; every rank gets its result or raises its error."""
        if self._group is None:
            return work()
        box: list[Any] = [None]
        own: Exception | None = None
        if self.is_first:
            try:
                box = [_Outcome(work(), None)]
            except Exception as error:  # the others wait for any answer
                box, own = [_Outcome(None, Failure.of(error))], error
        self._collective(lambda: dist.broadcast_object_list(box, src=0, group=self._group))
        if own is not None:
            raise own
        if box[0].failure is not None:
            raise box[0].failure.rebuild(0)
        return box[0].value  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        self._collective(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def vote(self, ballot: Ballot) -> Verdict:
        """One all-reduce of 184 bytes. Raises RanksDisagree on all ranks if they are not at the same step, or vote on
        different questions."""
        words = _words(ballot.layout_digest or _NO_DIGEST)
        known = ballot.layout_digest is not None
        asked, step = int(ballot.question), ballot.step
        votes = torch.tensor(
            [
                *(-ballot.busy, -ballot.failed, -ballot.yes, known),
                *(asked, -asked, step, -step),
                *words,
                *(-word for word in words),
            ],
            dtype=torch.int64,
            device="cpu",  # the script may have set another default device, and gloo needs this one
        )
        if self._group is not None:
            self._collective(lambda: dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group))
        busy, failed, yes, all_known, lowest_asked, highest_asked, first_step, last_step, *extremes = votes.tolist()
        if lowest_asked != -highest_asked:
            raise RanksDisagree(
                f"Between step {first_step} and step {-last_step} one rank looks whether its metrics are the best, and "
                "another saves. Pass the metric of Best(…) to step() on every rank, at the same steps"
            )
        if first_step != -last_step:
            raise RanksDisagree(f"One rank saves step {first_step} and another step {-last_step}")
        lowest, highest = extremes[: len(words)], [-word for word in extremes[len(words) :]]
        return Verdict(bool(busy), bool(failed), bool(all_known) and lowest == highest, bool(yes))

    def first_says(self, step: int, question: Question, *, yes: bool, error: Exception | None) -> bool:
        """Rank 0's answer, on every rank; the others' arguments do not count. With an `error` every rank raises it."""
        said = Ballot(step, busy=False, failed=error is not None, layout_digest=None, question=question, yes=yes)
        try:
            verdict = self.vote(said)
        except HoldfastError as lost:
            if isinstance(lost, RanksDisagree):
                raise
            raise RanksDisagree(
                f"Not every rank looks at the metrics of step {step}: one has ended, or was not passed them ({lost})"
            ) from lost
        if verdict.failed:
            self.raise_together(error)
        return verdict.yes

    def stand_in(self, work: Callable[[], object], *, since: int) -> Exception | None:
        """On a background thread, while the others are in a collective that this rank's training thread does not come
        to: does `work`, which raises on all ranks. Returns its error, which every later collective of this rank raises
        again. Does nothing, and returns None, if the training thread has met the others after its collective number
        `since`."""
        with self._turn:
            if self.collectives != since:
                return None
            try:
                work()
            except Exception as error:
                self._raised = error
            return self._raised

    def raise_together(self, error: Exception | None) -> NoReturn:
        """Some rank has an error: every rank raises the lowest failing rank's."""
        self.together(lambda: _raise(error))
        raise AssertionError("a rank that failed has an error")

    def _collective(self, call: Callable[[], object]) -> None:
        with self._turn:
            if self._raised is not None:
                raise self._raised
            self.collectives += 1
            began = time.monotonic()
            try:
                call()
            except (RuntimeError, ValueError) as error:
                # If not, a rank has ended, which the others see at once.
                ran_out = time.monotonic() - began >= self.timeout_seconds
                within = f" within {self.timeout_seconds:.0f} s" if ran_out else ""
                raise RankLost(f"The ranks could not reach each other{within} ({error})") from error


def _boot_id() -> str:
    """Tells machines of one name apart, as pods have it whose template names the host. Empty off Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _words(digest: str) -> list[int]:
    return [int(digest[at : at + 8], 16) for at in range(0, 64, 8)]
