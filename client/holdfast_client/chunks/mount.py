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


class MountAccess:
    """One per client, shared by all transfers. Thread-safe."""

    def __init__(self, offer: Callable[[], MountProofOffer], *, enabled: bool) -> None:
        self._offer = offer
        self._usable = enabled
        self._proof: MountProof | None = None
        self._renew_at = 0.0
        self._lock = threading.Lock()

    def proof(self) -> MountProof | None:
        """The proof to send along, or None where there is no mount. Raises HoldfastError if the service is away."""
        with self._lock:
            if self._usable and (self._proof is None or time.monotonic() >= self._renew_at):
                self._proof = self._prove()
                self._usable = self._proof is not None
            return self._proof if self._usable else None

    def give_up(self) -> None:
        """Reading or writing there was refused: from now on over HTTP."""
        with self._lock:
            self._usable = False

    def _prove(self) -> MountProof | None:
        asked_at = time.monotonic()
        try:
            offer = self._offer()
        except (Forbidden, RouteNotFound):
            return None
        if offer.proof_id is None or offer.path is None:
            return None
        try:
            with open(offer.path, encoding="ascii") as file:
                content = file.read(65).strip()
        except (OSError, ValueError):
            return None
        self._renew_at = asked_at + offer.expires_in_seconds * _RENEW_AT
        return MountProof(proof_id=offer.proof_id, content=content) if _CONTENT.fullmatch(content) else None
