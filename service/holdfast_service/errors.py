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
