"""The service's own calls to a bucket, whichever library makes them: retries, the guard, and what a refusal is.

Each store says what its library raises and which codes its vendor has; from there on an answer means the same in every
store. The libraries try once, because stores/retry.py is the one retry: an unavailable store is given up after the same
time whatever it is. Messages name the host and the store's own code, never a URL: one with a signature is a secret.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from typing import TypeVar

from holdfast_service.stores.base import (
    ObjectArchived,
    ObjectMismatch,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from holdfast_service.stores.bucket.network import connections, unreachable
from holdfast_service.stores.retry import TRIES, with_retries

_SKEW = timedelta(minutes=14)
_Result = TypeVar("_Result")


class AlreadyDone(StoreError):  # noqa: N818
    """An object of this name is there and was not overwritten, or what was asked for is under way. It never leaves
    stores/."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a store says when it does not do something. `date` is the header; `operation` the vendor's name for what was
    asked."""

    status: int
    code: str
    date: str | None = None
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Codes:
    """A vendor's own codes, by what they mean."""

    done: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    no_bucket: frozenset[str] = frozenset()
    mismatch: frozenset[str] = frozenset()
    archived: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    skewed: frozenset[str] = frozenset()
    lacking: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()


class BucketCalls(ABC):
    """To one `origin`. Safe to use from several threads. `name` begins a sentence about it, `remedy` ends the one about
    a refusal. `guard` is called before each change; `pool` is for requests that carry their signature in the URL."""

    errors: tuple[type[Exception], ...]
    """What the library raises."""
    codes: Codes
    place = "bucket"

    def __init__(self, origin: str, name: str, remedy: str) -> None:
        self.name = name
        self.guard: Callable[[], None] = lambda: None
        self.pool = connections(origin)
        self._remedy = remedy

    def read(self, call: Callable[[], _Result], *, tries: int = TRIES) -> _Result:
        """What `call` returns. Raises StoreError."""

        def once() -> _Result:
            try:
                return call()
            except self.errors as error:
                answer = self.answer_of(error)
                raise (self.unreachable(error) if answer is None else self.refusal(answer)) from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                # What a library raises when it reads an answer of something else, such as a proxy's page.
                raise StoreUnavailable(
                    f"{self.name} answered with something that is no answer of such a store ({type(error).__name__}); "
                    "check the endpoint and what stands before it"
                ) from error

        return with_retries(once, tries=tries)

    def change(self, call: Callable[[], _Result]) -> _Result:
        """As `read`, for what writes or deletes. Raises what the guard raises."""
        self.guard()
        return self.read(call)

    @abstractmethod
    def answer_of(self, error: Exception) -> Answer | None:
        """What the store said; None if there was no answer. May raise a StoreError of the vendor's own."""

    def unreachable(self, error: Exception) -> StoreError:
        """What stands between the service and the store."""
        return unreachable(self.name, error)

    def refusal(self, answer: Answer) -> StoreError:
        """What an answer means to the contract."""
        name, codes, code, status = self.name, self.codes, answer.code, answer.status
        what = f"{code or 'no reason given'}, status {status}"
        if code in codes.done:
            return AlreadyDone(f"{name} has it already ({what})")
        if code in codes.archived:
            return ObjectArchived("the object is archived in the store; thaw it before it is read")
        if code in codes.mismatch:
            return ObjectMismatch(f"{name} refused the bytes ({what})")
        if code in codes.no_bucket:
            return StoreRefused(f"{name} is not there; make the {self.place}, or correct its name in the store's URL")
        if code in codes.held:
            return StoreRefused(f"{name} holds the object, and lets no caller delete or change it ({what})")
        if status == 507 or code in codes.full:
            return StoreFull(f"{name} is full ({what}); free some room or raise its quota")
        if code in codes.skewed or (status == 403 and _is_far_off(answer.date)):
            return StoreRefused(
                f"{name} refuses what the service signs: by its clock it is {answer.date}, and by the service's "
                f"{format_datetime(datetime.now(UTC), usegmt=True)}; set both by NTP"
            )
        if status == 501 or code in codes.lacking:
            return StoreRefused(
                f"{name} lacks an operation that the service needs, {answer.operation} ({what}); use a store that has "
                "it"
            )
        if status == 404 and code in codes.missing:
            return ObjectMissing("there is no such object in the store")
        if code in codes.later or status in {408, 409, 429} or status >= 500:
            return StoreUnavailable(f"{name} asks to come back later ({what})")
        return StoreRefused(f"{name} refuses the service ({what}); {self._remedy}")

    def close(self) -> None:
        self.pool.clear()


def time_of(date: str | None) -> datetime:
    """When the store says that it answered, by its Date header. StoreUnavailable if it does not."""
    try:
        return parsedate_to_datetime(date or "").astimezone(UTC)
    except ValueError:
        raise StoreUnavailable("the store does not say what time it is; try again") from None


def _is_far_off(date: str | None) -> bool:
    try:
        return abs(time_of(date) - datetime.now(UTC)) > _SKEW
    except StoreUnavailable:
        return False
