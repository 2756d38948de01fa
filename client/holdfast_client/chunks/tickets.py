"""How long a ticket may be used, and the source of read tickets: the service gives a few at a time, under a lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError, TicketExpired, TicketProblem, UnexpectedReply
from holdfast_protocol.checkpoints import ReadChunks, ReadTicket
from holdfast_protocol.states import StoreRole

USED_PART = 0.9
"""A transfer that begins in the last tenth of a ticket's life could end after it."""

WAITS_PER_CHUNK = 20
"""How often a chunk may miss its turn. After more, the tickets expire before they are used."""


class TicketWaitedTooLong(TicketExpired):
    """Its turn came too late. No store has refused anything, so this is no reason to give up."""


class TicketLife:
    """Counts on this machine's monotonic clock (rule database-clock)."""

    def __init__(self, expires_in_seconds: int) -> None:
        self._ends = time.monotonic() + expires_in_seconds * USED_PART

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around a transfer. Raises TicketWaitedTooLong if it begins or is refused after the ticket's time; with a slow
        or unavailable store a ticket expires between two tries, which says nothing against the next one."""
        self._check()
        try:
            yield
        except TicketProblem:
            self._check()
            raise

    def _check(self) -> None:
        if time.monotonic() >= self._ends:
            raise TicketWaitedTooLong("The ticket's time was over before its turn came")


log = logging.getLogger("holdfast.client")

_RENEW_LEASE_AT = 0.5


class TicketSource:
    """Tickets to read one checkpoint. Each request renews the lease, which keeps the checkpoint from being purged. For
    the scheduling thread alone. `close` ends the lease."""

    def __init__(self, client: Client, checkpoint_id: str) -> None:
        self._client = client
        self._checkpoint_id = checkpoint_id
        self._lease_id: str | None = None
        self._renew_lease_at = 0.0
        self._told_unprotected = False
        self._avoided: list[StoreRole] = []

    def ask(self, digests: list[str], *, with_mount: bool) -> list[ReadTicket]:
        """A ticket for each, in this order. `with_mount`: it may name a file, if this machine sees the store's own
        mount."""
        asked_at = time.monotonic()
        reads = self._client.restores.read_chunks(
            self._checkpoint_id,
            ReadChunks(
                digests=digests,
                lease_id=self._lease_id,
                mount_proof=self._client.mount.proof() if with_mount else None,
                other_mount_proofs=self._client.mount.other_proofs() if with_mount else [],
                avoid_stores=self._avoided,
            ),
        )
        if reads.unprotected is not None and not self._told_unprotected:
            log.warning("reading %s without a lease: %s", self._checkpoint_id, reads.unprotected)
            self._told_unprotected = True
        self._lease_id = reads.lease_id
        self._renew_lease_at = asked_at + reads.lease_expires_in_seconds * _RENEW_LEASE_AT
        tickets = {ticket.digest: ticket for ticket in reads.chunks}
        if not tickets.keys() >= set(digests):
            raise UnexpectedReply("The service did not answer for every chunk that it was asked about")
        return [tickets[digest] for digest in digests]

    def seconds_until_renewal(self) -> float | None:
        """None without a lease: chunks from the host need none."""
        return None if self._lease_id is None else max(0.05, self._renew_lease_at - time.monotonic())

    def renew(self, digest: str) -> None:
        """Keeps the lease during slow transfers, by asking for any ticket again."""
        self.ask([digest], with_mount=False)

    def avoids(self, store: StoreRole) -> bool:
        return store in self._avoided

    def avoid(self, store: StoreRole) -> None:
        """The store does not answer: the next tickets are for another store that has the chunk."""
        self._avoided.append(store)

    def close(self) -> None:
        """A lease that cannot be ended expires by itself."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            with suppress(HoldfastError):
                self._client.restores.release(lease_id)
