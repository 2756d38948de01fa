"""Holds on checkpoints. See holdfast_protocol.holds."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.holds import ExtendHold, HoldView, PlaceHold, ReleaseHold


class HoldOperations(Operations):
    def place_hold(self, checkpoint_id: str, request: PlaceHold) -> HoldView:
        """Nobody takes the checkpoint away until another token releases the hold, or it ends. The same again gives the
        hold that is in force."""
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "holds"), HoldView, body=request)

    def holds_on(
        self, checkpoint_id: str, *, over: bool = False, cursor: str | None = None, limit: int | None = None
    ) -> Page[HoldView]:
        """One page of a checkpoint's holds; `over`: also those that are released or have ended."""
        return self.transport.call(
            "GET",
            path("checkpoints", checkpoint_id, "holds"),
            Page[HoldView],
            params={"over": over, "cursor": cursor, "limit": limit},
        )

    def holds(
        self,
        *,
        project: str | None = None,
        run: str | None = None,
        over: bool = False,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[HoldView]:
        """One page of the holds that the token may see, the newest first."""
        return self.transport.call(
            "GET",
            path("holds"),
            Page[HoldView],
            params={"project": project, "run": run, "over": over, "cursor": cursor, "limit": limit},
        )

    def all_holds(
        self, *, project: str | None = None, run: str | None = None, over: bool = False
    ) -> Iterator[HoldView]:
        return all_items(lambda cursor: self.holds(project=project, run=run, over=over, cursor=cursor))

    def all_holds_on(self, checkpoint_id: str, *, over: bool = False) -> Iterator[HoldView]:
        return all_items(lambda cursor: self.holds_on(checkpoint_id, over=over, cursor=cursor))

    def extend_hold(self, hold_id: str, request: ExtendHold) -> HoldView:
        """Moves the end of a hold further away."""
        return self.transport.call("PATCH", path("holds", hold_id), HoldView, body=request)

    def release_hold(self, hold_id: str, request: ReleaseHold) -> HoldView:
        """Only by another person's token: not by the one that placed it, nor by one that it has made or was made by."""
        return self.transport.call("POST", path("holds", hold_id, "release"), HoldView, body=request)
