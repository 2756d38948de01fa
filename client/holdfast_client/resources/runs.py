"""Projects, runs and tokens. See holdfast_protocol.runs and holdfast_protocol.service."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.resources.base import Operations, all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.runs import EditProject, ProjectView, RunView
from holdfast_protocol.service import CreateToken, TokenCreated, TokenView
from holdfast_protocol.states import RunStatus


class RunOperations(Operations):
    def projects(
        self, *, deleted: bool = False, cursor: str | None = None, limit: int | None = None
    ) -> Page[ProjectView]:
        """`deleted`: those in the trash, and no others."""
        params = {"deleted": deleted or None, "cursor": cursor, "limit": limit}
        return self.transport.call("GET", path("projects"), Page[ProjectView], params=params)

    def all_projects(self, *, deleted: bool = False) -> Iterator[ProjectView]:
        return all_items(lambda cursor: self.projects(deleted=deleted, cursor=cursor))

    def project(self, project: str) -> ProjectView:
        return self.transport.call("GET", path("projects", project), ProjectView)

    def edit_project(self, project: str, request: EditProject, *, etag: str | None = None) -> ProjectView:
        """Makes the project if it is not there, and sets what the request says. `etag`: of the view that was seen; a
        quota that is there changes only from that one. Raises EditNeedsVersion and EditConflict."""
        headers = None if etag is None else {"If-Match": etag}
        return self.transport.call("PUT", path("projects", project), ProjectView, body=request, headers=headers)

    def runs(
        self,
        project: str,
        *,
        status: RunStatus | None = None,
        deleted: bool = False,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[RunView]:
        """`deleted`: those in the trash, and no others."""
        return self.transport.call(
            "GET",
            path("projects", project, "runs"),
            Page[RunView],
            params={"status": status, "deleted": deleted or None, "cursor": cursor, "limit": limit},
        )

    def all_runs(self, project: str, *, status: RunStatus | None = None, deleted: bool = False) -> Iterator[RunView]:
        return all_items(lambda cursor: self.runs(project, status=status, deleted=deleted, cursor=cursor))

    def make_run(self, project: str, run: str) -> RunView:
        """Makes the run; the same again is fine."""
        return self.transport.call("PUT", path("projects", project, "runs", run), RunView)

    def run(self, project: str, run: str) -> RunView:
        return self.transport.call("GET", path("projects", project, "runs", run), RunView)

    def create_token(self, request: CreateToken) -> TokenCreated:
        """Makes a token. Not tried again after a lost reply: the secret is told once, and a second try would
        leave a token behind that nobody holds."""
        return self.transport.call("POST", path("tokens"), TokenCreated, body=request, retry_seconds=0)

    def tokens(self, *, cursor: str | None = None, limit: int | None = None) -> Page[TokenView]:
        return self.transport.call("GET", path("tokens"), Page[TokenView], params={"cursor": cursor, "limit": limit})

    def all_tokens(self) -> Iterator[TokenView]:
        return all_items(lambda cursor: self.tokens(cursor=cursor))

    def revoke_token(self, token_id: str) -> TokenView:
        return self.transport.call("DELETE", path("tokens", token_id), TokenView)
