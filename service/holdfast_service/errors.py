"""The one exception that an operation raises for its caller. app.py turns it into problem+json; nothing else does."""

from __future__ import annotations

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
