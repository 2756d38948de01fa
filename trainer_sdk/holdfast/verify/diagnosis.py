"""From what differs to which piece of state is likely missing. Pure; each cause carries the evidence it rests on.

Order of trust: what was seen to be left as it is made at the start; then a batch that the undisturbed launch had at
another step; then random numbers; and only then what follows from nothing of that being so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast.verify.evidence import Comparison, differing_rates, left_outside, other_batches, restored_otherwise
from holdfast.verify.records import Boundary, Outside, Trail


class Piece(StrEnum):
    """What may be missing."""

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
    """The variable or the path that it is about; empty where there is none."""
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
    Piece.COMPONENT: "dataloader",
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
    causes = [*_left_outside(straight, resumed, saved_step), *_data(straight, first)]
    causes += _incomplete(straight, resumed, saved_step)
    causes = causes or [*_rates(straight, first), *_random_numbers(straight, first)]
    return causes or [_nothing_seen(comparison, first)]


def _left_outside(straight: Trail, resumed: Trail, saved_step: int) -> list[Cause]:
    causes = []
    for name, _, there in left_outside(straight, resumed, saved_step):
        piece = _piece(name, there)
        as_new = "and after restore() it was not what it had been when the checkpoint was saved"
        evidence = f"{name} ({there.type}) is not in the state, {as_new}"
        if piece is Piece.SCHEDULER:
            evidence += "".join(f"; {text}" for text in _rate_texts(straight, resumed.boundaries[0]))
        causes.append(Cause(piece, name, evidence, _remedy(piece, name)))
    # What trains comes before what only feeds it: a loader's generator follows from its position.
    return sorted(causes, key=lambda cause: cause.piece in (Piece.DATA, Piece.COMPONENT))


def _piece(name: str, outside: Outside) -> Piece:
    named = f"{name} {outside.type}".lower()
    if outside.kind == "stateful" and any(word in named for word in ("loader", "sampler", "data")):
        return Piece.DATA
    return _OF_KIND[outside.kind]


def _data(straight: Trail, first: Boundary) -> list[Cause]:
    causes = []
    for name, steps in other_batches(straight, first.step, first).items():
        if steps:
            seen = f"at step {first.step} {name} held what the undisturbed launch had had at step {steps[0]}"
            causes.append(Cause(Piece.DATA, name, seen, _DATA_REMEDY))
    wanted = straight.at(first.step)
    if not causes and wanted is not None and wanted.now.batches != first.now.batches:
        seen = (
            f"after step {first.step} the DataLoaders had handed out {_numbers(first.now.batches)} batches, "
            f"and {_numbers(wanted.now.batches)} in the undisturbed launch"
        )
        names = [name for name, steps in other_batches(straight, first.step, first).items() if not steps]
        if names:
            causes.append(Cause(Piece.DATA, names[0], seen, _DATA_REMEDY))
    return causes[:1]


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


def _random_numbers(straight: Trail, first: Boundary) -> list[Cause]:
    there = straight.at(first.step)
    names = [name for name, state in first.now.rng.items() if there is not None and there.now.rng.get(name) != state]
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
    return f'Put it into the state: state["{_KEYS[piece]}"] = {variable}.'


def _numbers(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "no"
