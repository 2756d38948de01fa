"""Proves that this machine sees the store's own filesystem, so that the service hands out paths instead of URLs.

The proof is the content of a file that the service has just written. Where that fails, everything goes over HTTP and
nobody is told: a mount is a short cut and never a need.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from holdfast_client.errors import Forbidden, RouteNotFound
from holdfast_protocol.chunks import MountProof, MountProofOffer

_CONTENT = re.compile(r"[0-9a-f]{64}")
_RENEW_AT = 0.7
"""Part of a proof's life after which a new one is asked for, so that none runs out on its way."""


_ASK_AGAIN_SECONDS = 30.0
"""After so long, where a store that is a mounted filesystem did not answer the service."""


class MountAccess:
    """One per client, shared by all transfers. Thread-safe."""

    def __init__(self, offer: Callable[[], MountProofOffer], *, enabled: bool) -> None:
        self._offer = offer
        self._usable = enabled
        self._proof: MountProof | None = None
        self._others: list[MountProof] = []
        self._renew_at = float("-inf")
        self._lock = threading.Lock()

    def proof(self) -> MountProof | None:
        """The proof to send along, or None where there is no mount of the store that is written to. Raises
        HoldfastError if the service is away."""
        with self._lock:
            self._renew()
            return self._proof

    def other_proofs(self) -> list[MountProof]:
        """Of the mounts of further stores, for reading. Raises as `proof` does."""
        with self._lock:
            self._renew()
            return list(self._others)

    def give_up(self) -> None:
        """Reading or writing there was refused: from now on over HTTP."""
        with self._lock:
            self._usable, self._proof, self._others = False, None, []

    def _renew(self) -> None:
        if not self._usable or time.monotonic() < self._renew_at:
            return
        asked_at = time.monotonic()
        try:
            offer = self._offer()
        except (Forbidden, RouteNotFound):
            offer = _NOTHING
        self._proof = _prove(offer)
        self._others = [proof for other in offer.others if (proof := _prove(other)) is not None]
        self._usable = self._proof is not None or bool(self._others) or offer.away
        life_seconds = offer.expires_in_seconds * _RENEW_AT
        self._renew_at = asked_at + (min(life_seconds, _ASK_AGAIN_SECONDS) if offer.away else life_seconds)


_NOTHING = MountProofOffer(proof_id=None, path=None, expires_in_seconds=0)


def _prove(offer: MountProofOffer) -> MountProof | None:
    if offer.proof_id is None or offer.path is None:
        return None
    try:
        with open(offer.path, encoding="ascii") as file:
            content = file.read(65).strip()
    except (OSError, ValueError):
        return None
    return MountProof(proof_id=offer.proof_id, content=content) if _CONTENT.fullmatch(content) else None
