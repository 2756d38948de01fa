"""The states of a save: which may follow which, what its handle says of them, and how a rank learns the last one."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.errors import HoldfastError, SaveFailed
from holdfast.save.job import CommitWatch, SaveHandle, SaveState
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointState

Q, S, H, P, U, D, C, L = SaveState
WAYS = {
    Q: [],
    S: [S],
    H: [S, H],
    P: [S, H, P],
    U: [S, U],
    D: [S, U, D],
    C: [S, U, D, C],
    L: [L],
}
"""A way to each state."""
FOLLOW = {Q: [S, H, U, L], S: [H, U, L], H: [P, U, L], P: [P, U, L], U: [U, D, P, L], D: [U, C, P, L]}
VIEW = cast(CheckpointView, object())


def handle_at(state: SaveState) -> SaveHandle:
    handle = SaveHandle(7)
    for each in WAYS[state]:
        assert handle.become(each)
    assert handle.state is state
    return handle


@pytest.mark.parametrize(("before", "after"), list(itertools.product(FOLLOW, SaveState)))
def test_a_state_follows_only_where_it_can(before: SaveState, after: SaveState) -> None:
    handle = handle_at(before)
    if after in FOLLOW[before]:
        assert handle.become(after)
        assert handle.state is after
    else:
        with pytest.raises(ValueError, match=f"step 7 is {before}, and cannot become {after}"):
            handle.become(after)
        assert handle.state is before


@pytest.mark.parametrize("end", ["committed", "lost", "spooled"])
def test_after_the_end_nothing_changes(end: str) -> None:
    handle = handle_at(D)
    if end == "committed":
        handle.mark_committed(VIEW)
    else:
        handle.fail(SaveFailed("the job ended"), SaveState(end))
    for late in SaveState:
        assert not handle.become(late), "the thread that was still at it finds the save over"
    handle.mark_committed(VIEW)
    handle.fail(SaveFailed("too late"))
    assert handle.state == end
    assert (handle.committed.exception() is None) == (end == "committed")


def futures(handle: SaveHandle) -> list[Any]:
    ends = []
    for future in (handle.staged, handle.local, handle.committed):
        ends.append((future.exception() or future.result()) if future.done() else "open")
    return ends


def test_the_futures_follow_from_the_states() -> None:
    failure = SaveFailed("the disk is gone")
    assert futures(handle_at(Q)) == ["open"] * 3
    assert futures(handle_at(S)) == [None, "open", "open"]
    assert futures(handle_at(P)) == [None, True, "open"]
    handle = handle_at(P)
    handle.fail(failure, P)
    assert futures(handle) == [None, True, failure]
    handle = handle_at(Q)
    handle.fail(failure)
    assert (futures(handle), handle.state) == ([failure] * 3, L)
    handle = handle_at(D)
    handle.mark_committed(VIEW)
    assert futures(handle) == [None, "open", VIEW]


class EndedStore:
    """The job's store, once the process that held it has left."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection was likely closed")


@pytest.mark.rule("waiting-holds-nothing")
@pytest.mark.parametrize("state", [CheckpointState.COMMITTED, CheckpointState.UPLOADING])
def test_a_rank_whose_jobs_store_has_ended_asks_the_service_before_it_calls_its_save_lost(
    state: CheckpointState,
) -> None:
    view: Any = SimpleNamespace(state=state)
    client: Any = SimpleNamespace(checkpoints=SimpleNamespace(get=lambda checkpoint_id: view))
    ranks: Any = SimpleNamespace(rank=1, host_leader=0, store=lambda purpose: EndedStore())
    watch = CommitWatch(client, ranks, threading.Event())
    if state is CheckpointState.COMMITTED:
        assert watch.wait(1, "a checkpoint") is view
    else:
        with pytest.raises(HoldfastError, match="store ended"):
            watch.wait(1, "a checkpoint")
