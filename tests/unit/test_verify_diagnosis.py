"""What a verification makes of two launches' records: what differs first, and what is likely missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.verify import verification as verification_module
from holdfast.verify.diagnosis import Piece, diagnose
from holdfast.verify.evidence import compare, follows_on, unrepeated
from holdfast.verify.launching import Launched, LaunchFailed
from holdfast.verify.records import Boundary, Outside, Snapshot, Trail
from holdfast.verify.report import as_document, as_text
from holdfast.verify.verification import Verdict, Verification, Verifier

SAVED = 2


def snapshot(step: int, **changed: Any) -> Snapshot:
    state = {"model/w": f"weights {step}", "optimizer/param_groups[0].lr": f"0.{9 - step}", "notes": str(step)}
    return replace(
        Snapshot(state, ["model/w"], {"torch": f"drawn {step}"}, {}, {"batch": f"samples {step}"}), **changed
    )


def trail(steps: range, *, rank: int = 0, **changed: Any) -> Trail:
    """`changed` at every step after SAVED."""
    boundaries = [
        Boundary(step, {"loss": f"1.{step}", "seconds": "0.5"}, snapshot(step, **(changed if step > SAVED else {})))
        for step in steps
    ]
    return Trail(rank, steps.start, snapshot(steps.start - 1), boundaries)


def state(step: int, **changed: str) -> dict[str, str]:
    return snapshot(step).state | changed


STRAIGHT = trail(range(6))


def diagnosed(resumed: Trail) -> list[Any]:
    comparison = compare([STRAIGHT], [resumed])
    return diagnose(STRAIGHT, resumed, comparison, SAVED)


@pytest.mark.rule("bit-exact-resume")
def test_equal_launches_are_equal_on_all_ranks_and_the_first_difference_is_the_earliest() -> None:
    resumed = trail(range(3, 6))
    assert compare([STRAIGHT], [resumed]).equal
    assert follows_on([STRAIGHT], [resumed], SAVED)
    two = [STRAIGHT, trail(range(6), rank=1)]
    other = trail(range(3, 6), rank=1)
    other.boundaries[1] = Boundary(
        4, {"loss": "2.0", "seconds": "0.5"}, snapshot(4, state=state(4, **{"model/w": "x"}))
    )
    found = compare(two, [resumed, other])
    assert [(each.rank, each.step, each.where, each.name) for each in found.first] == [
        (1, 4, "metric", "loss"),
        (1, 4, "tensor", "model/w"),
    ]


@pytest.mark.parametrize(
    ("again", "names"),
    [
        (trail(range(6), rng={"torch": "drawn otherwise"}), {"rng torch"}),
        (trail(range(6), state=state(3)), None),
    ],
)
def test_what_undisturbed_launches_do_not_repeat(again: Trail, names: set[str] | None) -> None:
    assert unrepeated([STRAIGHT], [again]) == names


def test_a_measured_time_is_left_out_and_a_loss_never() -> None:
    slow = trail(range(6))
    slow.boundaries[0] = replace(slow.boundaries[0], metrics={"loss": "1.0", "seconds": "0.7"})
    assert unrepeated([STRAIGHT], [slow]) == {"metric seconds"}
    slow.boundaries[0] = replace(slow.boundaries[0], metrics={"loss": "1.1", "seconds": "0.5"})
    assert unrepeated([STRAIGHT], [slow]) is None


def test_a_script_that_never_restores_is_told_so_although_it_is_equal() -> None:
    anew = trail(range(6))
    anew.start = anew.restored = None
    assert not follows_on([STRAIGHT], [anew], SAVED)
    assert [cause.piece for cause in diagnosed(anew)] == [Piece.RESTORE]


def test_a_script_that_does_not_begin_where_restore_says_is_told_so() -> None:
    [cause] = diagnosed(trail(range(4, 6)))
    assert cause.piece is Piece.START
    assert "began with step 4, not 3" in cause.evidence


def test_a_script_that_ends_early_is_told_so() -> None:
    short = trail(range(3, 5))
    assert not follows_on([STRAIGHT], [short], SAVED)
    [cause] = diagnosed(short)
    assert (cause.piece, "3, 4 only" in cause.evidence) == (Piece.START, True)


def test_a_component_that_loads_half_of_its_state_is_named() -> None:
    half = trail(range(3, 6), state=state(3, **{"model/w": "x"}))
    half.restored = snapshot(2, state=state(2, notes="0"))
    [cause] = diagnosed(half)
    assert (cause.piece, cause.name) == (Piece.COMPONENT, "notes")


def test_another_rate_without_a_scheduler_in_sight_is_told_as_one() -> None:
    rate = {"optimizer/param_groups[0].lr": "0.9"}
    [cause] = diagnosed(trail(range(3, 6), state=state(3, **rate, **{"model/w": "x"})))
    assert cause.piece is Piece.SCHEDULER
    assert "was 0.9 instead of 0.6" in cause.evidence


def test_an_object_that_was_put_right_after_restore_is_not_accused() -> None:
    """A scaler that the script sets itself, from a value of the state, while its data begin anew."""
    there, fresh = (Outside("grad_scaler", "GradScaler", {"scale": scale}) for scale in ("8.0", "1.0"))
    straight = trail(range(6))
    straight.boundaries = [replace(each, now=replace(each.now, outside={"s": there})) for each in straight.boundaries]
    resumed = trail(range(3, 6), outside={"s": there}, locals={"batch": "samples 0"}, state=state(3, notes="x"))
    resumed.restored = snapshot(2, outside={"s": fresh})
    comparison = compare([straight], [resumed])
    [cause] = diagnose(straight, resumed, comparison, SAVED)
    assert (cause.piece, cause.name) == (Piece.DATA, "batch")
    resumed.boundaries[0] = replace(resumed.boundaries[0], now=replace(resumed.boundaries[0].now, outside={"s": fresh}))
    first, *_ = diagnose(straight, resumed, comparison, SAVED)
    assert (first.piece, first.name) == (Piece.SCALER, "s")


def test_where_nothing_is_seen_the_report_says_what_remains() -> None:
    resumed = trail(range(3, 6), state=state(3, **{"model/w": "x"}))
    comparison = compare([STRAIGHT], [resumed])
    causes = diagnose(STRAIGHT, resumed, comparison, SAVED)
    assert (causes[0].piece, causes[0].name) == (Piece.DATA, "")
    verification = Verification(Verdict.NOT_EXACT, comparison, SAVED, 1, ["loss"], 1, causes)
    text = as_text(verification)
    assert "step 3 differs first (1 rank)" in text
    assert "  tensor model/w: straight weights 3, resumed x\n" in text
    document = as_document(verification)
    assert (document["first_differing_step"], document["causes"][0]["piece"]) == (3, "data position")


def verified(monkeypatch: pytest.MonkeyPatch, *launches: Trail) -> Verification:
    """By launches that end as these do: straight, killed, resumed."""
    waiting = list(launches)
    monkeypatch.setattr(
        verification_module, "launch", lambda *told, **more: Launched([waiting.pop(0)], True, Path("output.log"))
    )
    verifier = Verifier(["train"], Path("nowhere"), {}, timeout_seconds=1, say=lambda text: None)
    return verifier.verify(6, SAVED + 1)


def seen(given: Trail, *, tensors: bool = False, **metrics: str) -> Trail:
    boundaries = [
        replace(each, metrics=metrics, now=replace(each.now, tensors=each.now.tensors if tensors else []))
        for each in given.boundaries
    ]
    return replace(given, boundaries=boundaries)


@pytest.mark.rule("bit-exact-resume")
def test_launches_are_not_called_exact_where_nothing_of_the_training_was_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script whose state is its step count restores no model, and all that is looked at is equal."""
    straight, killed, resumed = trail(range(6)), trail(range(3)), trail(range(3, 6))
    blind = verified(monkeypatch, *(seen(each) for each in (straight, killed, resumed)))
    assert blind.verdict is Verdict.NOTHING_SEEN
    assert "EXACT" not in as_text(blind)
    assert "Pass metrics=" in as_text(blind)
    assert as_document(blind)["verdict"] == "nothing seen"
    timed = verified(
        monkeypatch, seen(straight, seconds="0.5"), seen(killed, seconds="0.7"), seen(resumed, seconds="0.5")
    )
    assert timed.verdict is Verdict.NOTHING_SEEN, "a metric that is left out is not compared"
    for shown in ({"tensors": True}, {"loss": "1.5"}):
        found = verified(monkeypatch, *(seen(each, **shown) for each in (straight, killed, resumed)))  # type: ignore[arg-type]
        assert found.verdict is Verdict.EXACT


def test_a_script_that_ends_by_itself_is_exact_only_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verified(monkeypatch, trail(range(5)), trail(range(3)), trail(range(3, 5)))
    assert (found.verdict, found.comparison.compared_steps) == (Verdict.EXACT, [3, 4])
    short = verified(monkeypatch, trail(range(5)), trail(range(3)), trail(range(3, 4)), trail(range(5)))
    assert short.verdict is Verdict.NOT_EXACT
    with pytest.raises(LaunchFailed, match="after 3 steps"):
        verified(monkeypatch, trail(range(3)), trail(range(3)), trail(range(3, 6)))
