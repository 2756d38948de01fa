"""What a store's error means to the caller of the service."""

from __future__ import annotations

from holdfast_protocol.problems import ProblemCode
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import (
    ObjectArchived,
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreNotOurs,
    StoreRefused,
    StoreUnavailable,
)

_CODES: dict[type[StoreError], ProblemCode] = {
    ObjectMissing: ProblemCode.CHUNK_GONE,
    ObjectMismatch: ProblemCode.CHECKSUM_MISMATCH,
    ObjectArchived: ProblemCode.CHECKPOINT_COLD,
    StoreUnavailable: ProblemCode.STORE_UNAVAILABLE,
    StoreFull: ProblemCode.STORE_FULL,
    StoreRefused: ProblemCode.STORE_REFUSED,
    StoreNotOurs: ProblemCode.STORE_FOREIGN,
}


def store_problem(error: StoreError) -> ProblemError:
    """Ready to be raised by an endpoint."""
    return ProblemError(_CODES.get(type(error), ProblemCode.INTERNAL), str(error))
