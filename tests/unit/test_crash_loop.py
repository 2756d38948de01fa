"""The decision of the crash-loop breaker: which ends count, what ends the count, and what bounds it."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast.errors
import holdfast_client.errors
from holdfast_protocol.states import AttemptOutcome
from holdfast_service.training.crash_loop import FEW_STEPS, Tried, crash_loop

FAILED, LOST, FENCED = AttemptOutcome.FAILED, AttemptOutcome.LOST, AttemptOutcome.FENCED


def tried(*ends: Any) -> list[Tried]:
    """From the oldest to the newest: an outcome, or the changes of a failed attempt. Returned newest first."""
    found = []
    for number, end in enumerate(ends, 1):
        facts: dict[str, Any] = {"outcome": FAILED, "error_type": "RuntimeError"} | (
            end if isinstance(end, dict) else {"outcome": end}
        )
        found.append(Tried(number, **({"point": "ck_x", "point_step": 100} | facts)))
    return found[::-1]


@pytest.mark.parametrize(
    ("ends", "crashed"),
    [
        ([FAILED, FAILED, FAILED], (1, 2, 3)),
        ([FAILED, FAILED], None),
        ([FAILED, LOST, FAILED], None),
        ([LOST, FENCED, FAILED], (1, 2, 3)),
        ([FAILED, FAILED, {"error_type": None}], None),
        ([FAILED, {"error_type": None}, {"error_type": None}], (1, 2, 3)),
        ([FAILED, FAILED, AttemptOutcome.PREEMPTED, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"rolled_back": True, "outcome": FENCED}, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"called_later": True, "outcome": FENCED}, LOST], None),
        ([FAILED, FAILED, AttemptOutcome.FINISHED, FAILED], None),
        ([FAILED, FAILED, {"committed": True}, FAILED], None),
        ([FAILED, FAILED, {"last_step": 100 + FEW_STEPS}], (1, 2, 3)),
        ([FAILED, FAILED, {"last_step": 101 + FEW_STEPS}], None),
        ([FAILED, FAILED, {"error_type": "holdfast.errors.StateMismatchError"}], None),
        ([FAILED, FAILED, {"error_type": "torch.OutOfMemoryError"}, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"point": "ck_w"}, FAILED], (1, 2, 4)),
        ([FAILED, FAILED, {"outcome": None}], None),
    ],
)
def test_which_ends_count(ends: list[Any], crashed: tuple[int, ...] | None) -> None:
    loop = crash_loop(tried(*ends), "ck_x", attempts=3)
    assert (None if loop is None else loop.attempts) == crashed


def test_every_error_is_the_checkpoints_the_jobs_or_that_of_a_lost_rank() -> None:
    """By what two crashes and one such error come to; two such errors beside one crash tell a lost rank."""
    damaged = {"ChecksumMismatch", "ChunkCorrupt", "ChunkLost", "IntegrityError", "TreeFormatError"}
    ours = {
        of_class
        for module in (holdfast.errors, holdfast_client.errors)
        for of_class in vars(module).values()
        if isinstance(of_class, type) and issubclass(of_class, Exception)
    }
    assert {"StoreUnavailable", "SaveFailed", "LayoutError", "RankLost"} | damaged <= {each.__name__ for each in ours}
    for of_class in ours:
        name = of_class.__name__
        expected = "crash" if name in damaged else "silence" if name == "RankLost" else "neither"
        assert end_by(f"{of_class.__module__}.{name}") == expected, of_class
    assert {end_by(f"torch.distributed.Dist{kind}Error") for kind in ("", "Backend", "Network", "Store")} == {"silence"}
    for name in (
        *("SystemExit", "ModuleNotFoundError", "FileNotFoundError", "argparse.ArgumentError"),
        *("OSError", "ConnectionRefusedError", "TimeoutError", "MemoryError"),
        *("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "requests.exceptions.ReadTimeout"),
        *("requests.exceptions.ConnectionError", "httpx.ConnectError", "huggingface_hub.errors.HfHubHTTPError"),
        *("botocore.exceptions.ConnectTimeoutError", "urllib.error.URLError"),
    ):
        assert end_by(name) == "neither", name
    for name in ("RuntimeError", "ValueError", "torch.AcceleratorError", "loader.FileNotFoundError"):
        assert end_by(name) == "crash", name
    assert end_by(None) == "silence"


def end_by(error_type: str | None) -> str:
    this = {"error_type": error_type}
    if crash_loop(tried(FAILED, FAILED, this), "ck_x", attempts=3) is not None:
        return "crash"
    return "neither" if crash_loop(tried(FAILED, this, this), "ck_x", attempts=3) is None else "silence"


def test_a_release_counts_anew() -> None:
    three = tried(FAILED, FAILED, FAILED)
    assert crash_loop(three, "ck_x", attempts=3, released_after=1) is None
    assert crash_loop(three, "ck_x", attempts=3) is not None


def test_the_other_points_are_those_since_the_last_progress() -> None:
    older = {"point": "ck_old", "committed": True}
    loop = crash_loop(tried(older, {"point": "ck_y"}, *[FAILED] * 3), "ck_x", attempts=3)
    assert loop is not None
    assert loop.others == {"ck_y"}
