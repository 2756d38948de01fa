"""Put, show and delete policies of any kind. See holdfast_protocol.policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.policies import PolicyKind, PolicyView, PutPolicy


class PolicyOperations(Operations):
    """`run` None: the project's policy."""

    def policy(self, kind: PolicyKind, project: str, run: str | None = None) -> PolicyView:
        """The policy that holds; of a run its own or its project's, which `level` tells. Raises PolicyNotFound."""
        return self.transport.call("GET", _route(kind, project, run), PolicyView)

    def put_policy(
        self,
        kind: PolicyKind,
        project: str,
        run: str | None,
        document: Mapping[str, Any],
        *,
        etag: str | None = None,
    ) -> PolicyView:
        """Puts the first policy, or replaces the one that `etag` was read from. Raises InvalidRequest for what is no
        policy, and EditConflict if another was put in between."""
        request = PutPolicy(document=dict(document))
        return self.transport.call("PUT", _route(kind, project, run), PolicyView, body=request, headers=_match(etag))

    def delete_policy(self, kind: PolicyKind, project: str, run: str | None = None, *, etag: str) -> PolicyView:
        """Deletes the target's own policy, as `etag` was read from it, and gives back what it was."""
        return self.transport.call("DELETE", _route(kind, project, run), PolicyView, headers=_match(etag))


def _route(kind: PolicyKind, project: str, run: str | None) -> str:
    if run is None:
        return path("projects", project, "policies", kind.value)
    return path("projects", project, "runs", run, "policies", kind.value)


def _match(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"If-Match": etag}
