"""Learn what became of a checkpoint after this rank's seal: one rank per host asks the service (protocol rule 12).

The lowest rank of each host long-polls and writes what it heard into the job's key-value store; the others on that host
read it there, or that the leader has begun the step anew. A leader that is cut off may say nothing for long: without a
word they ask for themselves now and then. Runs on background threads; no collectives.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from holdfast.errors import HoldfastError
from holdfast.ranks import Ranks
from holdfast_client.client import Client
from holdfast_client.errors import CheckpointAborted, ServiceUnavailable, TransferStopped
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import AbortCause, CheckpointState

LONG_POLL_SECONDS = 30
_LOOK_SECONDS = 0.1
_ASK_YOURSELF = ""
_OUTCOMES_KEPT = 64


class CommitWatch:
    """`number` is the save's, counted alike on all ranks. Per save, the leader of a host calls `tell` exactly once."""

    def __init__(self, client: Client, ranks: Ranks, stop: threading.Event) -> None:
        self._client = client
        self._leads = ranks.host_leader == ranks.rank
        self._host = ranks.host_leader
        self._store = ranks.store("outcomes")
        self._stop = stop

    def wait(self, number: int, checkpoint_id: str) -> CheckpointView:
        """The checkpoint once it is no longer uploading. Raises CheckpointAborted where a rank has given the save up,
        and HoldfastError if the service cannot be asked."""
        told = None if self._leads else self._told(number, checkpoint_id)
        return told or self._ask(number, checkpoint_id)

    def tell(self, number: int, outcome: CheckpointView | None) -> None:
        """Hands the outcome to the other ranks of this host; None sends them to ask the service themselves."""
        if self._store is None or not self._leads:
            return
        try:
            self._store.set(self._key(number), outcome.model_dump_json() if outcome else _ASK_YOURSELF)
            # With a local tier the ranks may be some saves apart; nobody is that far behind.
            self._store.delete_key(self._key(number - _OUTCOMES_KEPT))
        except RuntimeError:
            return  # the job's store has ended, and with it the job

    def leave(self, number: int, checkpoint_id: str) -> None:
        """This checkpoint was given up, and the leader begins its step anew: who waits for it asks the service."""
        if self._store is None or not self._leads:
            return
        try:
            self._store.set(self._key(number, checkpoint_id), _ASK_YOURSELF)
        except RuntimeError:
            return

    def give_up(self, number: int, reason: str) -> None:
        """This rank has failed for good. The service aborts the checkpoint that is there; a rank that comes to this
        save later would begin it anew, and wait for ever."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"given-up/{number}", reason)

    def given_up(self, number: int) -> str | None:
        """Why this save cannot be completed, if a rank has said so."""
        try:
            if self._store is None or not self._store.check([f"given-up/{number}"]):
                return None
            return self._store.get(f"given-up/{number}").decode()
        except RuntimeError:
            return None  # the job's store has ended, and with it the job

    def _told(self, number: int, checkpoint_id: str) -> CheckpointView | None:
        """What the leader says, or what the service says meanwhile; None if the leader sends this rank to ask."""
        if self._store is None:
            return None
        asked_at = time.monotonic()
        try:
            while not self._store.check([self._key(number)]):
                if self._store.check([self._key(number, checkpoint_id)]):
                    return None
                if time.monotonic() - asked_at >= LONG_POLL_SECONDS:
                    if (view := self._look(checkpoint_id)) is not None:
                        return view
                    asked_at = time.monotonic()
                if self._stop.wait(_LOOK_SECONDS):
                    raise TransferStopped("This job ended before it heard what became of its checkpoint")
            told = self._store.get(self._key(number))
            return CheckpointView.model_validate_json(told) if told else None
        except RuntimeError as error:
            raise HoldfastError(f"The job's store ended while a checkpoint was still under way ({error})") from error

    def _look(self, checkpoint_id: str) -> CheckpointView | None:
        """The checkpoint, if it is over. The leader may have failed at it without an end, and be at another one of the
        same step, which needs this rank."""
        try:
            view = self._client.checkpoint(checkpoint_id)
        except ServiceUnavailable:
            return None  # whoever reaches the service first, the leader or this rank
        return view if view.state is not CheckpointState.UPLOADING else None

    def _ask(self, number: int, checkpoint_id: str) -> CheckpointView:
        while not self._stop.is_set():
            # Asked before the service is: what has committed all the same is committed.
            reason = self.given_up(number)
            view = self._client.checkpoint(checkpoint_id, wait_seconds=None if reason else LONG_POLL_SECONDS)
            if view.state is not CheckpointState.UPLOADING:
                return view
            if reason:
                # It may have failed without a word to the service.
                raise CheckpointAborted(reason, context={"cause": AbortCause.RANK_FAILED})
        raise TransferStopped("This job ended before it heard what became of its checkpoint")

    def _key(self, number: int, checkpoint_id: str = "") -> str:
        return f"{self._host}/{number}/{checkpoint_id}"
