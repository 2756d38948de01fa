"""The caller, as its token says."""

from __future__ import annotations

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
                f"administrator for `holdfast token create --scope {scope.value}`.",
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
