"""What rollback() asks before anything is done: all ranks get the same answer, whichever components each of them holds.

The ranks are threads. One that leaves before the others ask breaks their barrier, as it would leave
them in a collective.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.distributed.ranks import Ranks
from holdfast.errors import ConfigurationError, RanksDisagree
from holdfast.health.rollback import Rollback

Asked = dict[str, Any]
ASKED: Asked = {"steps": None, "before": None, "keep": frozenset(), "skip_data": False}


class Thread(Ranks):
    """One of several ranks; what they do together is the real thing."""

    def __init__(self, rank: int, told: list[Any], barrier: Barrier) -> None:
        self.rank = rank
        self._told = told
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait(60)
        told = list(self._told)
        self._barrier.wait(60)
        return told


def go_back(*asked: Asked) -> list[Any]:
    """Of each rank: the step that it goes below and what it leaves as it is; or what it raises."""
    barrier, told = Barrier(len(asked)), [None] * len(asked)

    def on(rank: int) -> Any:
        went: list[Any] = []
        session: Any = SimpleNamespace(
            ranks=Thread(rank, told, barrier),
            run="project/run",
            has_opened=True,
            progress=SimpleNamespace(step=9),
            open_anew=lambda: None,
            opened=SimpleNamespace(attempt=2),
        )
        restorer: Any = SimpleNamespace(
            choose_before=lambda step: None,
            go_back=lambda state, before, kept: went.append((before, sorted(kept))) or 0,
        )
        pipeline: Any = SimpleNamespace(wait_idle=lambda seconds: True)
        try:
            Rollback(session, pipeline, restorer).back(**{**ASKED, **asked[rank]})
        except Exception as error:
            return error
        return went[0]

    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(on, range(len(asked))))


WITH, WITHOUT, OTHER = (dict.fromkeys(["model", *more], 0) for more in (["loader"], [], ["val_loader", "ema"]))


def test_loaders_that_only_some_ranks_hold_or_name_otherwise_stay_where_they_are() -> None:
    back = go_back(*({"state": state, "steps": 2, "skip_data": True} for state in (WITHOUT, WITH, OTHER)))
    assert back == [(8, ["loader", "val_loader"])] * 3
    back = go_back(*({"state": state, "keep": frozenset(["ema"])} for state in (WITHOUT, OTHER)))
    assert back == [(None, ["ema"])] * 2


@pytest.mark.parametrize(
    ("first", "second", "raises"),
    [
        ({"skip_data": True}, {"skip_data": True}, ConfigurationError),
        ({"keep": frozenset(["emma"])}, {"keep": frozenset(["emma"])}, ConfigurationError),
        ({"steps": 0}, {"steps": 1}, ConfigurationError),
        ({"before": 3}, {"before": 4}, RanksDisagree),
        ({"keep": frozenset(["model"])}, {}, RanksDisagree),
        ({"skip_data": True}, {}, RanksDisagree),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(first: Asked, second: Asked, raises: type[Exception]) -> None:
    refused = go_back({"state": WITHOUT, **first}, {"state": WITHOUT, **second})
    assert [type(each) for each in refused] == [raises] * 2, refused
