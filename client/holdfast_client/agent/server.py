"""The agent of a node: takes saves from the ranks of this user's jobs, and finishes them.

    accept -> rank_link.py, for each rank of this node

Nothing is on a disk: a save that was handed over is lost if the agent is killed after its rank, unless an agent of
another host has a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from holdfast_client.agent import messages as say
from holdfast_client.agent.channel import Channel, refuse_long
from holdfast_client.agent.copies import Copies
from holdfast_client.agent.held_save import HeldSave, JobHere, Ledger
from holdfast_client.agent.memory_tier import MemoryTier, Part
from holdfast_client.agent.process import serves_at
from holdfast_client.agent.rank_link import RankLink
from holdfast_client.agent.shared_memory import Budget, gib
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.client import Client
from holdfast_client.errors import ConfigurationError
from holdfast_client.local.private_folder import PrivateFolder, open_file, try_lock, wait_until
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.text import counted

log = logging.getLogger("holdfast.agent")

_ADDRESS = TypeAdapter(PeerAddress)
_DYING_SECONDS = 30.0
_REST_SECONDS = 1
_BACKLOG = 128


class Agent:
    """Listens from its construction on. `serve` takes connections until `end` is called, from any thread or a signal's
    handler."""

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        *,
        keeps: int,
        wait_seconds: float = 0.0,
        of_launch: bool = False,
        copies: Callable[[MemoryTier, PeerAddress | None], Copies] | None = None,
    ) -> None:
        """`path`: of the socket; its folder is made with mode 0700. `keeps`: a MemoryTier's states. `wait_seconds`: for
        one that was told to end, and still finishes what it has. `of_launch`: it ends with its launch, and stands by
        while another one serves, which does so too. `copies`: from and to agents of other hosts; it is given the
        address of the agent that served here before. Raises ConfigurationError if the folder is not this user's alone
        or another agent serves there."""
        self.path = path
        self.budget = Budget(limit_bytes)
        self.tier = MemoryTier(self.budget, keeps)
        self.ledger = Ledger()
        self._of_launch = of_launch
        self._started_at = datetime.now(UTC)
        self._lock = threading.Condition()
        self._links: set[RankLink] = set()
        self._jobs: dict[tuple[str, str, str], JobHere] = {}
        refuse_long(path)
        self._folder = PrivateFolder(path.parent)
        self._own = open_file(f"{path.name}.lock", os.O_RDWR | os.O_CREAT, self._folder.descriptor)
        if not self._is_free(wait_seconds):
            os.close(self._own)
            self._folder.close()
            raise ConfigurationError(
                f"Another agent serves at {path}. One is enough for all of this user's jobs on a node. If nodes "
                "share this folder, name a socket on the node's own disk (--socket)."
            )
        self.copies = None
        if copies is not None:
            self.copies = copies(self.tier, self._earlier_address())
            self._note_address(self.copies.address)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # a dead agent's
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(_BACKLOG)
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def _earlier_address(self) -> PeerAddress | None:
        """Of the agent that served here before: the job's other hosts know this node's by it until the next launch."""
        try:
            return _ADDRESS.validate_json(os.pread(self._own, 4096, 0))
        except (OSError, ValidationError):
            return None

    def _note_address(self, address: PeerAddress) -> None:
        """In the lock's file, which this user alone can read."""
        with contextlib.suppress(OSError):  # the disk is full, or ends: the next agent has another address
            os.ftruncate(self._own, 0)
            os.pwrite(self._own, _ADDRESS.dump_json(address), 0)

    def _is_free(self, seconds: float) -> bool:
        # Asked too: a cleaner of old files may have removed the lock's.
        if not serves_at(self.path) and try_lock(self._own):
            return True
        if self._of_launch and serves_at(self.path):
            log.info("standing by while the agent of another launch serves at %s", self.path)
            return wait_until(lambda: try_lock(self._own) and not serves_at(self.path), math.inf)
        if serves_at(self.path):
            return False
        log.info("waiting until the agent before has ended at %s", self.path)
        return wait_until(lambda: try_lock(self._own), seconds)

    def serve(self, *, grace_seconds: float) -> int:
        """Afterwards living ranks go on by themselves. What was handed over is finished within `grace_seconds`: the end
        of a node ends its ranks too. Returns how many saves of dead ranks are lost."""
        log.info(
            "serving at %s; the ranks of this node may share %s; kept of each run while its next state is staged: %s",
            self.path,
            gib(self.budget.limit_bytes),
            counted(self.tier.states, "state"),
        )
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        rest = select.poll()
        rest.register(self._wake, select.POLLIN)
        while self._wake not in {descriptor for descriptor, _ in poll.poll()}:
            if not self._accept():
                rest.poll(_REST_SECONDS * 1000)
        return self._ended(time.monotonic() + grace_seconds)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._woken, b"\0")

    def status(self) -> say.Status:
        with self._lock:
            links = [link for link in self._links if link.run is not None]
        return say.Status(
            holdfast=version("holdfast"),
            pid=os.getpid(),
            of_launch=self._of_launch,
            started_at=self._started_at,
            memory_bytes=self.budget.taken_bytes,
            memory_limit_bytes=self.budget.limit_bytes,
            ranks=len(links),
            held=[part for link in links for part in link.held()],
            kept=self.tier.shown(),
            counts=self.ledger.counts,
        )

    def left_by_dead(self, run: RunName) -> list[HeldSave]:
        """The saves of this run whose ranks are dead, and which are not sealed yet. Of a rank that has just died, all:
        its last words may not be read yet."""
        with self._lock:
            links = [link for link in self._links if link.run == run]
        return [save for link in links if link.is_dead for save in link.unsealed()]

    def has_unread_dead(self, run: RunName) -> bool:
        with self._lock:
            links = [link for link in self._links if link.run == run]
        return any(not link.is_dead and link.is_hung_up for link in links)

    def all_are_dead(self, run: RunName) -> bool:
        """The ranks of this run here, and not only their connections: a large process takes seconds to die."""
        with self._lock:
            links = [link for link in self._links if link.run == run]
        return wait_until(lambda: not any(link.rank_lives for link in links), _DYING_SECONDS)

    def sealed(self, run: RunName) -> list[Part]:
        """The parts of this run's saves that are sealed, and not released yet."""
        with self._lock:
            links = [link for link in self._links if link.run == run]
        return [part for link in links for part in link.sealed()]

    def job_of(self, hand: say.HandOver, settings: ClientSettings, host_ranks: int) -> JobHere:
        """With one more member; `leave_job` takes it off. The last one closes the job's own client."""
        with self._lock:
            key = (hand.project, hand.run, hand.launch_id)
            if key not in self._jobs:
                self._jobs[key] = JobHere(Client(settings), host_ranks)
            self._jobs[key].join()
            return self._jobs[key]

    def leave_job(self, job: JobHere) -> None:
        with self._lock:
            is_last = job.leave()
            if is_last:
                self._jobs = {key: other for key, other in self._jobs.items() if other is not job}
        if is_last:
            job.close()

    def ended(self, link: RankLink) -> None:
        with self._lock:
            self._links.discard(link)
            self._lock.notify_all()

    def _accept(self) -> bool:
        """False if there is no descriptor or memory for it: the rank waits in the queue, and would wake us at once."""
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            log.warning("a rank could not be taken: %s", error)
            return False
        channel = Channel(connected)
        try:
            channel.refuse_strangers()
        except OSError as error:
            log.warning("a connection was refused: %s", error)
            channel.close()
            return True
        link = RankLink(self, channel)
        with self._lock:
            self._links.add(link)
        try:
            link.start()
        except RuntimeError as error:  # no thread can be started
            log.warning("a rank could not be taken: %s", error)
            self.ended(link)
            channel.close()
        return True

    def _ended(self, until: float) -> int:
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with self._lock:
            links = [*self._links]
        for link in links:
            link.leave_to_rank()
        with self._lock:
            while self._links and (left := until - time.monotonic()) > 0:
                self._lock.wait(left)
            lost = sum(len(link.unsealed()) for link in self._links if not link.rank_lives)
        if lost:
            log.error("%s of ranks that are gone could not be finished in time", counted(lost, "save"))
        fcntl.flock(self._own, fcntl.LOCK_UN)
        os.close(self._own)
        if self.copies is not None:  # the agent of the next launch need not wait for what other hosts do
            self.copies.close()
        self._folder.close()
        os.close(self._wake)
        os.close(self._woken)
        return lost
