"""From differences to the likely missing piece of state. Pure; each cause has its evidence.

In the order of trust: an object that stayed as it is made at the start; a batch that the undisturbed launch had at
another step; random numbers; and, if none of these is seen, the remaining guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.verify.evidence import Comparison, differing_rates, left_outside, other_batches, restored_otherwise
from holdfast.verify.records import Boundary, Outside, Trail


class Piece(StrEnum):
    """The piece of state that may be missing."""

    RESTORE = "restore"
    START = "start"
    DATA = "data position"
    RNG = "random number generator"
    SCHEDULER = "LR scheduler"
    SCALER = "GradScaler"
    OPTIMIZER = "optimizer"
    MODEL = "second model"
    COMPONENT = "component"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cause:
    piece: Piece
    name: str
    """The variable or the path that the cause is about; may be empty."""
    evidence: str
    remedy: str


_OF_KIND = {
    "optimizer": Piece.OPTIMIZER,
    "lr_scheduler": Piece.SCHEDULER,
    "grad_scaler": Piece.SCALER,
    "generator": Piece.RNG,
    "data_generator": Piece.DATA,
    "model": Piece.MODEL,
    "stateful": Piece.COMPONENT,
}
_KEYS = {
    Piece.OPTIMIZER: "optimizer",
    Piece.SCHEDULER: "lr_scheduler",
    Piece.SCALER: "grad_scaler",
    Piece.MODEL: "ema",
}
_DATA_REMEDY = (
    "Save where the data loader is: holdfast.data.ResumableLoader around a DataLoader, or torchdata's "
    'StatefulDataLoader, as state["dataloader"].'
)


def diagnose(straight: Trail, resumed: Trail, comparison: Comparison, saved_step: int) -> list[Cause]:
    """Likely causes of the first difference, the likeliest first. At least one."""
    if resumed.restored is None:
        return [
            Cause(Piece.RESTORE, "", "the resumed launch never called restore()", "Call ckpt.restore(state) first.")
        ]
    first = resumed.boundaries[0]
    expected = next(step for step in straight.steps if step > saved_step)
    if first.step != expected:
        return [
            Cause(
                Piece.START,
                "",
                f"after the save of step {saved_step} the resumed launch began with step {first.step}, not {expected}",
                "Begin the loop with the step that ckpt.restore(state) returns.",
            )
        ]
    if comparison.equal:
        return [
            Cause(
                Piece.START,
                "",
                f"the resumed launch was equal, and trained steps {_numbers(resumed.steps)} only: it ended by itself",
                "Count the steps that are left from the step that ckpt.restore(state) returns.",
            )
        ]
    causes = [*_left_outside(straight, resumed, saved_step), *_earlier_batch(straight, first)]
    causes += _incomplete(straight, resumed, saved_step)
    causes = causes or [
        *_batches_given(straight, first),
        *_rates(straight, first),
        *_random_numbers(straight, first, comparison.ignored),
    ]
    causes = causes or _left_outside(straight, resumed, saved_step, equal_later=True)
    return causes or [_nothing_seen(comparison, first)]


def _left_outside(straight: Trail, resumed: Trail, saved_step: int, *, equal_later: bool = False) -> list[Cause]:
    causes = []
    for found in left_outside(straight, resumed, saved_step):
        if found.is_equal_later is not equal_later:
            continue
        name, there = found.name, found.there
        piece = _piece(name, there)
        as_new = "and after restore() it was not what it had been when the checkpoint was saved"
        evidence = f"{name} ({there.type}) is not in the state, {as_new}"
        if piece is Piece.SCHEDULER:
            evidence += "".join(f"; {text}" for text in _rate_texts(straight, resumed.boundaries[0]))
        causes.append(Cause(piece, name, evidence, _remedy(piece, name)))
    causes = _within(causes)
    # Trained objects come before those that only feed them: a loader's generator follows from its position.
    return sorted(causes, key=lambda cause: cause.piece in (Piece.DATA, Piece.COMPONENT))


def _within(causes: list[Cause]) -> list[Cause]:
    """If an object with a state_dict() holds the forgotten one, the state lacks that object."""
    holders = [cause for cause in causes if cause.piece is Piece.COMPONENT]
    found = {cause.name: cause for cause in causes}
    for holder in holders:
        inner = [cause for cause in causes if cause.name.startswith(f"{holder.name}.")]
        for cause in inner:
            found[cause.name] = replace(cause, remedy=holder.remedy)
        if inner:
            del found[holder.name]
    return list(found.values())


def _piece(name: str, outside: Outside) -> Piece:
    named = f"{name} {outside.type}".lower()
    if outside.kind == "stateful" and any(word in named for word in ("loader", "sampler", "data")):
        return Piece.DATA
    return _OF_KIND[outside.kind]


def _earlier_batch(straight: Trail, first: Boundary) -> list[Cause]:
    for name, steps in other_batches(straight, first.step, first).items():
        if steps:
            seen = f"at step {first.step} {name} had the value of the undisturbed launch at step {steps[0]}"
            return [Cause(Piece.DATA, name, seen, _DATA_REMEDY)]
    return []


def _batches_given(straight: Trail, first: Boundary) -> list[Cause]:
    """A loader whose position is in the state begins its pass again anyway, so its count tells nothing."""
    there = straight.at(first.step)
    has_loader = any("loader" in path.partition("/")[0].lower() for path in first.now.state)
    names = list(other_batches(straight, first.step, first))
    if there is None or has_loader or not names or there.now.batches == first.now.batches:
        return []
    seen = (
        f"{names[0]} differed at step {first.step}, after which the DataLoaders had handed out "
        f"{_numbers(first.now.batches)} batches, and {_numbers(there.now.batches)} in the undisturbed launch"
    )
    return [Cause(Piece.DATA, names[0], seen, _DATA_REMEDY)]


def _incomplete(straight: Trail, resumed: Trail, saved_step: int) -> list[Cause]:
    paths = restored_otherwise(straight, resumed, saved_step)
    if not paths:
        return []
    key = paths[0].partition("/")[0]
    return [
        Cause(
            Piece.COMPONENT,
            paths[0],
            f"{paths[0]} was saved, and was not the same after restore()",
            f"Let load_state_dict() of {key!r} set all that its state_dict() gives. A plain value of the state comes "
            f"back into the dict only: use state[{key!r}] after restore().",
        )
    ]


def _rates(straight: Trail, first: Boundary) -> list[Cause]:
    texts = _rate_texts(straight, first)
    return [Cause(Piece.SCHEDULER, "", texts[0], _remedy(Piece.SCHEDULER, "scheduler"))] if texts else []


def _rate_texts(straight: Trail, first: Boundary) -> list[str]:
    there = straight.at(first.step)
    pairs = differing_rates(there, first) if there is not None else []
    return [f"after step {first.step} {path} was {got} instead of {wanted}" for path, wanted, got in pairs[:1]]


def _random_numbers(straight: Trail, first: Boundary, ignored: Sequence[str]) -> list[Cause]:
    there = straight.at(first.step)
    names = [
        name
        for name, state in first.now.rng.items()
        if there is not None and there.now.rng.get(name) != state and f"rng {name}" not in ignored
    ]
    if not names:
        return []
    evidence = (
        f"{' and '.join(names)} random numbers: restored as they were saved, and drawn otherwise "
        f"by the end of step {first.step}"
    )
    same = [each.step for each in straight.boundaries if each.now.rng.get(names[0]) == first.now.rng[names[0]]]
    if same:
        evidence += f", as in the undisturbed launch at step {same[0]}: seeded after restore()"
    return [
        Cause(
            Piece.RNG,
            names[0],
            evidence,
            "Seed before ckpt.restore(state), and give each DataLoader a generator of its own: making an iterator "
            "draws from torch's global one.",
        )
    ]


def _nothing_seen(comparison: Comparison, first: Boundary) -> Cause:
    if comparison.step == first.step:
        seen = (
            "state, random numbers and learning rates were as they should be, and still the step came out otherwise: "
            "the data that it was given, or something that no variable of the training loop leads to"
        )
        return Cause(Piece.DATA, "", seen, _DATA_REMEDY)
    return Cause(
        Piece.UNKNOWN,
        "",
        f"the first resumed steps were equal, and step {comparison.step} was not: something that counts steps and is "
        "not in the state, such as gradients that are still being accumulated, or a schedule of the script's own",
        "Put what counts into the state, and save where no gradients are pending.",
    )


def _remedy(piece: Piece, name: str) -> str:
    variable = name or "it"
    if piece is Piece.RNG:
        return (
            f'Put its state into the state and back: an object whose state_dict() is {{"generator": {variable}'
            ".get_state()} and whose load_state_dict() sets it."
        )
    if piece is Piece.DATA:
        return _DATA_REMEDY
    key = _KEYS.get(piece, variable.rpartition(".")[2])
    return f'Put it into the state: state["{key}"] = {variable}.'


def _numbers(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "no"
