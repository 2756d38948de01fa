"""Projects, runs, tokens and sessions. See holdfast_protocol.runs and holdfast_protocol.service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast_client.errors import SessionNotFound
from holdfast_client.resources.base import PLANS_SECONDS, Resource, all_items, if_match, made_once, once
from holdfast_client.transport import Params, Transport, path
from holdfast_protocol.base import Page, RunName
from holdfast_protocol.pruning import (
    DeleteAll,
    Deletion,
    TakenBack,
)
from holdfast_protocol.runs import EditProject, EditRun, ForkRun, MetricsHistory, ProjectView, RunView
from holdfast_protocol.service import (
    CreateToken,
    ExchangedToken,
    ExchangeToken,
    OpenSession,
    RotateToken,
    SignInCode,
    SignInProviders,
    TokenCreated,
    TokenRotated,
    TokenView,
)
from holdfast_protocol.states import RunStatus


class Projects(Resource):
    """See holdfast_protocol.runs."""

    def list(self, *, deleted: bool = False, cursor: str | None = None, limit: int | None = None) -> Page[ProjectView]:
        """`deleted`: only those in the trash."""
        params = {"deleted": deleted or None, "cursor": cursor, "limit": limit}
        return self.transport.call("GET", path("projects"), Page[ProjectView], params=params)

    def all(self, *, deleted: bool = False) -> Iterator[ProjectView]:
        return all_items(lambda cursor: self.list(deleted=deleted, cursor=cursor))

    def get(self, project: str) -> ProjectView:
        return self.transport.call("GET", path("projects", project), ProjectView)

    def edit(self, project: str, request: EditProject, *, etag: str | None = None) -> ProjectView:
        """Makes the project if it does not exist, and sets the request's fields. `etag`: of the view that the caller
        saw; an existing quota changes only from that one. Raises EditNeedsVersion and EditConflict."""
        route = path("projects", project)
        return self.transport.call("PUT", route, ProjectView, body=request, headers=if_match(etag))

    def delete(self, project: str, *, reason: str = "", dry_run: bool = False, etag: str | None = None) -> Deletion:
        """Deletes a project whose runs are all deleted. Raises CheckpointProtected while one is not."""
        return _delete(self.transport, path("projects", project), reason, dry_run, etag)

    def undelete(self, project: str) -> TakenBack:
        """Takes a project back, without its runs. Raises ProjectNotFound once it is purged."""
        return self.transport.call("POST", path("projects", project, "undelete"), TakenBack)


class Runs(Resource):
    """See holdfast_protocol.runs."""

    def list(
        self,
        project: str | None = None,
        *,
        status: RunStatus | Sequence[RunStatus] | None = None,
        tag: str | None = None,
        forked_from: str | None = None,
        deleted: bool = False,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[RunView]:
        """One page, the newest first. `project` None: of all projects that the token sees. `status`: only these; `tag`:
        only those that have it. `deleted`: only those in the trash. `forked_from`: only forks of the project's run of
        this name, or of the checkpoint with this id."""
        return self.transport.call(
            "GET",
            path("runs") if project is None else path("projects", project, "runs"),
            Page[RunView],
            params={
                "status": status,
                "tag": tag,
                "forked_from": forked_from,
                "deleted": deleted or None,
                "cursor": cursor,
                "limit": limit,
            },
        )

    def all(
        self,
        project: str | None = None,
        *,
        status: RunStatus | Sequence[RunStatus] | None = None,
        tag: str | None = None,
        forked_from: str | None = None,
        deleted: bool = False,
    ) -> Iterator[RunView]:
        return all_items(
            lambda cursor: self.list(
                project, status=status, tag=tag, forked_from=forked_from, deleted=deleted, cursor=cursor
            )
        )

    def create(self, project: str, run: str) -> RunView:
        """Makes the run; an existing run is fine."""
        return self.transport.call("PUT", path("projects", project, "runs", run), RunView)

    def get(self, project: str, run: str) -> RunView:
        return self.transport.call("GET", path("projects", project, "runs", run), RunView)

    def edit(self, project: str, run: str, request: EditRun, etag: str) -> RunView:
        """Sets the request's fields. `etag`: of the view that the caller saw, or `*`. Raises EditConflict."""
        route = path("projects", project, "runs", run)
        return self.transport.call("PATCH", route, RunView, body=request, headers=if_match(etag))

    def fork(self, source: RunName, name: str, selector: str = "latest") -> RunView:
        """Makes the run `name` in the same project, which begins with a checkpoint of `source`, and copies no byte. The
        same fork again finds it. Raises RunExists for a name that is used otherwise, NoRestorePoint, CheckpointNotFound
        and CheckpointCold for what no job could resume from, CheckpointUnproven until the service has read it."""
        route = path("projects", source.project, "runs", source.run, "forks")
        request = ForkRun(selector=selector, name=name)
        return self.transport.call("POST", route, RunView, body=request, headers=once())

    def metrics_history(
        self,
        project: str,
        run: str,
        *,
        names: Iterable[str] = (),
        from_step: int | None = None,
        to_step: int | None = None,
        points: int | None = None,
        attempt: int | None = None,
    ) -> MetricsHistory:
        """What the run's jobs have measured, along its lineage, or all of one attempt. Without `names` all metrics.
        `points`: of each metric, at most."""
        params: Params = {
            "name": [*names] or None,
            "from_step": from_step,
            "to_step": to_step,
            "points": points,
            "attempt": attempt,
        }
        route = path("projects", project, "runs", run, "metrics-history")
        return self.transport.call("GET", route, MetricsHistory, params=params)

    def delete(
        self, project: str, run: str, *, reason: str = "", dry_run: bool = False, etag: str | None = None
    ) -> Deletion:
        """Moves all of a run to the trash. `etag`: of the dry run that the caller saw, or `*`. Raises CheckpointHeld
        and CheckpointProtected if a checkpoint must stay, EditNeedsVersion and EditConflict."""
        return _delete(self.transport, path("projects", project, "runs", run), reason, dry_run, etag)

    def undelete(self, project: str, run: str) -> TakenBack:
        """Takes a run back, with the part of it that is not being purged yet. Raises RunNotFound once it is purged."""
        return self.transport.call(
            "POST", path("projects", project, "runs", run, "undelete"), TakenBack, waits_seconds=PLANS_SECONDS
        )


class Tokens(Resource):
    """See holdfast_protocol.service."""

    def create(self, request: CreateToken) -> TokenCreated:
        """Makes a token. If a reply with a token's text is lost, that token is revoked."""
        call = self.transport.call
        return made_once(
            lambda: call("POST", path("tokens"), TokenCreated, body=request, headers=once()), undo=self.revoke
        )

    def list(self, *, cursor: str | None = None, limit: int | None = None) -> Page[TokenView]:
        return self.transport.call("GET", path("tokens"), Page[TokenView], params={"cursor": cursor, "limit": limit})

    def all(self) -> Iterator[TokenView]:
        return all_items(lambda cursor: self.list(cursor=cursor))

    def revoke(self, token_id: str) -> TokenView:
        return self.transport.call("DELETE", path("tokens", token_id), TokenView)

    def revoke_own(self) -> TokenView:
        """This client's token, which `holdfast login` has made. Raises Forbidden for another one."""
        return self.transport.call("DELETE", path("tokens", "current"), TokenView)

    def providers(self) -> SignInProviders:
        """Where people can sign in. No token is needed."""
        return self.transport.call("GET", path("sign-ins", "providers"), SignInProviders, authorized=False)

    def exchange(self, request: ExchangeToken) -> ExchangedToken:
        """A token for one of another issuer. No token of the service is needed. Raises IdentityRefused."""
        return self.transport.call("POST", path("tokens", "exchange"), ExchangedToken, body=request, authorized=False)

    def rotate(self, token_id: str, request: RotateToken) -> TokenRotated:
        """Replaces a token by one like it. If a reply with a token's text is lost, that token is revoked."""
        call, route = self.transport.call, path("tokens", token_id, "rotate")
        return made_once(lambda: call("POST", route, TokenRotated, body=request, headers=once()), undo=self.revoke)

    def sign_in_code(self) -> SignInCode:
        """For the web page: opens one session of this client's token, within a minute."""
        return self.transport.call("POST", path("sign-in-codes"), SignInCode)


class Sessions(Resource):
    """Sign-ins to the web page: see holdfast_protocol.service."""

    def list(self, *, cursor: str | None = None, limit: int | None = None) -> Page[OpenSession]:
        """One page of the open ones, the newest first: of this client's token, or with `operate` or `admin` of every
        token that it may know of."""
        params = {"cursor": cursor, "limit": limit}
        return self.transport.call("GET", path("sessions"), Page[OpenSession], params=params)

    def all(self) -> Iterator[OpenSession]:
        return all_items(lambda cursor: self.list(cursor=cursor))

    def revoke(self, session_id: str) -> OpenSession | None:
        """Ends it at once. None: an earlier try of this call has ended it, and its reply was lost. Raises
        SessionNotFound if it is not open."""
        try:
            return self.transport.call("DELETE", path("sessions", session_id), OpenSession)
        except SessionNotFound as gone:
            if gone.earlier_try_ambiguous:
                return None
            raise


def _delete(transport: Transport, route: str, reason: str, dry_run: bool, etag: str | None) -> Deletion:
    return transport.call(
        "DELETE",
        route,
        Deletion,
        body=DeleteAll(reason=reason, dry_run=dry_run),
        headers=if_match(etag),
        waits_seconds=PLANS_SECONDS,
    )
