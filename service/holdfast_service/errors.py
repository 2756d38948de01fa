"""The one exception that an operation raises for its caller. app.py turns it into problem+json; nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_protocol.problems import PROBLEM_KINDS, ProblemCode


class ProblemError(Exception):
    """Something that the caller can act upon.

    `detail` says in one sentence what is wrong and in one what to do; `context` holds the facts for programs.
    """

    def __init__(self, code: ProblemCode, detail: str, **context: Any) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.context = context

    @property
    def status(self) -> int:
        return PROBLEM_KINDS[self.code].status


class WentBackError(ProblemError):
    """The database has lost changes that it had acknowledged: `lost`, in words, for operators alone. `noticed`: that is
    in the catalog already."""

    def __init__(self, lost: Sequence[str], *, noticed: bool = False) -> None:
        super().__init__(
            ProblemCode.CATALOG_WENT_BACK,
            "The service's database went back to an older state and has lost changes that it had acknowledged. Nothing "
            "of a job is written, no restore point is chosen and nothing is deleted until an operator has looked: "
            "stop the service, run `holdfast admin raise-epoch`, start it, run `holdfast catalog check`, and then "
            "either `holdfast catalog rebuild` into an empty database or `holdfast stores claim --accept-loss`.",
        )
        self.lost = tuple(lost)
        self.noticed = noticed


def refuse_unless_seen(what: str, etag: str, if_match: str | None, *, look: str = "Read it") -> None:
    """For what replaces or deletes: the caller must have seen the version that is there. `look` says how one sees
    it. Raises `edit_needs_version` (428) and `edit_conflict` (412)."""
    if if_match is None:
        raise ProblemError(
            ProblemCode.EDIT_NEEDS_VERSION,
            f"To change or delete {what}, say which version was seen. {look}, and send its `etag` as the header "
            "If-Match.",
            etag=etag,
        )
    if if_match not in (etag, "*"):
        raise ProblemError(
            ProblemCode.EDIT_CONFLICT,
            f"{what[:1].upper()}{what[1:]} was changed since it was read, and nothing was done. {look} again and "
            "decide anew.",
            etag=etag,
        )
