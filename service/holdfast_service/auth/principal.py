"""The caller, as its token says, and the text of a token: shown once, and nowhere afterwards. A hash of it is kept."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_service.errors import ProblemError


@dataclass(frozen=True)
class Principal:
    """`project_id` None: the token is good for every project."""

    token_id: str
    name: str
    scopes: frozenset[Scope]
    project_id: str | None = None
    project_name: str | None = None

    def sees_project(self, project_id: str) -> bool:
        return self.project_id is None or self.project_id == project_id

    def check_every_project(self) -> None:
        """For what concerns all projects at once."""
        if self.project_id is not None:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {self.name!r} belongs to the project {self.project_name!r}, and this concerns every "
                "project. Use a token that is good for all of them.",
            )

    def check_scope(self, scope: Scope) -> None:
        if scope not in self.scopes:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {self.name!r} lacks the scope {scope.value!r}. Use one that has it, or ask an "
                f"administrator for `holdfast tokens create --scope {scope.value}`.",
                scope=scope.value,
            )

    def check_project_name(self, project: str) -> None:
        if self.project_name is not None and self.project_name != project:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {self.name!r} belongs to the project {self.project_name!r} and not to {project!r}. "
                "Correct the project's name, or use a token of that project.",
                project=project,
            )


_TOKEN = re.compile(r"^hold_(?P<id>[0-9a-f]{16})_(?P<secret>[0-9a-f]{64})\Z")


# A random secret of 64 hex digits has about 14 of the 16 digits many times; typed-in ones and repetitions do not.
_LEAST_DISTINCT_DIGITS = 10


_LEAST_DISTINCT_PAIRS = 32


def new_token_text() -> str:
    """`hold_<id>_<secret>`: 64 and 256 random bits."""
    return f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


def parse_token(text: str) -> tuple[str, str]:
    """(id, SHA-256 of the secret). Raises ValueError for anything that is not a token; it does not repeat the text."""
    match = _TOKEN.match(text)
    if match is None:
        raise ValueError("a token is hold_, 16 lower-case hex digits, _ and 64 lower-case hex digits")
    return match["id"], hashlib.sha256(match["secret"].encode()).hexdigest()


def check_entropy(text: str) -> None:
    """Raises ValueError for a token that a person made up. Only for tokens that come from outside."""
    parse_token(text)
    secret = text.rpartition("_")[2]
    pairs = {secret[at : at + 2] for at in range(len(secret) - 1)}
    if len(set(secret)) < _LEAST_DISTINCT_DIGITS or len(pairs) < _LEAST_DISTINCT_PAIRS:
        raise ValueError(
            "its secret is not random; make one with `python -c 'import secrets; "
            'print(f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}")\'`'
        )
