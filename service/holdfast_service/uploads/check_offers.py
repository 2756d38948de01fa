"""Refuses offers that contradict themselves, before anything is reserved for them. Pure (protocol rule 14).

What is stored is named by its own digest and size: those of the chunk where it is raw, and its own where it is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_protocol.chunks import ChunkOffer
from holdfast_protocol.codecs import Codec
from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError


def check_offers(offers: Sequence[ChunkOffer], *, md5_needed: bool = False) -> None:
    """Raises `invalid_request`, which names the chunk. `md5_needed`: the store enforces MD5, and a ticket without one
    would let any bytes in."""
    seen: dict[str, ChunkOffer] = {}
    for offer in offers:
        if seen.setdefault(offer.digest, offer) != offer:
            raise _refusal(offer, "offered twice in one call, in two ways", "Offer it once")
        if offer.ask:
            _check_question(offer)
            continue
        if md5_needed and offer.md5 is None:
            raise _refusal(
                offer,
                "offered without the MD5 of its bytes on the wire, which is what this store compares",
                "Ask `/v1/server` (`store_asks_md5`), or start the job again with a current client",
            )
        if offer.codec is Codec.RAW:
            _check_raw(offer)
        else:
            _check_encoded(offer)


def _check_question(offer: ChunkOffer) -> None:
    if offer.codec is not Codec.RAW or offer.stored_digest or offer.stored_bytes is not None or offer.md5:
        raise _refusal(
            offer, "asked for and described at once", "To ask, give digest and bytes only; to offer it, leave `ask` out"
        )


def _check_raw(offer: ChunkOffer) -> None:
    if (offer.wire_digest, offer.wire_bytes) != (offer.digest, offer.bytes):
        raise _refusal(
            offer,
            "offered raw but with other bytes on the wire",
            "Leave stored_digest and stored_bytes out, or give the chunk's own",
        )


def _check_encoded(offer: ChunkOffer) -> None:
    if offer.stored_digest is None or offer.stored_bytes is None:
        raise _refusal(
            offer,
            f"offered as {offer.codec} without the digest and the size of its encoded bytes",
            "Give stored_digest and stored_bytes",
        )
    if not 0 < offer.stored_bytes < offer.bytes:
        raise _refusal(
            offer,
            f"offered as {offer.codec} with {offer.stored_bytes} bytes instead of {offer.bytes}",
            "Offer it raw where encoding does not make it smaller",
        )


def _refusal(offer: ChunkOffer, what: str, remedy: str) -> ProblemError:
    return ProblemError(
        ProblemCode.INVALID_REQUEST, f"The chunk {offer.digest} is {what}. {remedy}.", digest=offer.digest
    )
