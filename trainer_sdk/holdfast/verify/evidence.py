"""The differences between an undisturbed launch and one that was killed and resumed. Pure.

Verification -> **evidence** -> diagnosis. Two undisturbed launches are compared in the same way: the resume is not the
cause of their differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holdfast.verify.records import Boundary, Outside, Trail

Where = Literal["metric", "tensor", "value", "outside", "rng"]

_Pair = tuple[str, str | None, str | None]
"""Name, and its text in each of two launches."""

TRAINS: frozenset[str] = frozenset({"optimizer", "lr_scheduler", "grad_scaler", "generator", "model"})
"""Kinds of objects outside the state that are part of training or of its result: they must be equal as well."""


@dataclass(frozen=True)
class Difference:
    """One name at one step of one rank. `straight` and `resumed` are None if that launch lacks it."""

    rank: int
    step: int
    where: Where
    name: str
    straight: str | None
    resumed: str | None
    kind: str = ""
    """For an object outside the state: as in records.Outside."""


@dataclass
class Comparison:
    """All steps that both launches have."""

    compared_steps: list[int]
    first: list[Difference] = field(default_factory=list)
    """The differences of the first step that has any, metrics and tensors first; empty: all is equal."""
    ignored: list[str] = field(default_factory=list)
    """Names that undisturbed launches do not repeat either."""

    @property
    def equal(self) -> bool:
        return not self.first

    @property
    def step(self) -> int | None:
        return self.first[0].step if self.first else None


def compare(straight: Sequence[Trail], other: Sequence[Trail], *, ignored: frozenset[str] = frozenset()) -> Comparison:
    """Rank by rank, step by step, everything bit for bit. `ignored` are names as in _name()."""
    steps = sorted(set.intersection(*[set(trail.steps) for trail in (*straight, *other)]))
    for step in steps:
        found = [
            difference
            for left, right in zip(straight, other, strict=True)
            for difference in _at_step(left, right, step)
            if _name(difference) not in ignored
        ]
        if found:
            # Stable: within a kind the order is that of the state, and so of the model.
            return Comparison(steps, sorted(found, key=lambda each: _ORDER.index(each.where)), sorted(ignored))
    return Comparison(steps, [], sorted(ignored))


_ORDER: tuple[Where, ...] = ("metric", "tensor", "value", "outside", "rng")


def unrepeated(straight: Sequence[Trail], again: Sequence[Trail]) -> frozenset[str] | None:
    """Names that two undisturbed launches do not repeat although they train alike: a measured time, an unseeded and
    unused generator. None if tensors or a loss differ between them, and so training itself."""
    names: set[str] = set()
    for left, right in zip(straight, again, strict=True):
        for step in sorted(set(left.steps) & set(right.steps)):
            for difference in _at_step(left, right, step):
                if _is_training(difference):
                    return None
                names.add(_name(difference))
    return frozenset(names)


def _is_training(difference: Difference) -> bool:
    is_loss = difference.where == "metric" and "loss" in difference.name.lower()
    return is_loss or difference.where == "tensor" or difference.kind in TRAINS - {"generator"}


def follows_on(straight: Sequence[Trail], resumed: Sequence[Trail], saved_step: int) -> bool:
    """Whether every rank restored, and then trained exactly the steps of the straight launch after the save."""
    return all(
        right.restored is not None and right.steps == [step for step in left.steps if step > saved_step]
        for left, right in zip(straight, resumed, strict=True)
    )


def saw_training(straight: Sequence[Trail], comparison: Comparison) -> bool:
    """Whether a tensor of the state, or a metric that undisturbed launches repeat, was compared. If not, even a
    training without a restore would be equal."""
    compared = set(comparison.compared_steps)
    return any(
        boundary.now.tensors or any(f"metric {name}" not in comparison.ignored for name in boundary.metrics)
        for trail in straight
        for boundary in trail.boundaries
        if boundary.step in compared
    )


def restored_otherwise(straight: Trail, resumed: Trail, saved_step: int) -> list[str]:
    """Paths of the state whose values after restore() are not those of the save."""
    before = straight.at(saved_step)
    if before is None or resumed.restored is None:
        return []
    return [path for path, *_ in _differing(before.now.state, resumed.restored.state)]


@dataclass(frozen=True)
class LeftOutside:
    """An object that restore() left as it is made at the start, and that had changed when the state was saved."""

    name: str
    there: Outside
    is_equal_later: bool
    """One step later it is as in the straight launch: set right after restore(), or overwritten by that step."""


def left_outside(straight: Trail, resumed: Trail, saved_step: int) -> Iterator[LeftOutside]:
    """Objects outside the state whose own state was not brought back."""
    saved, first = straight.at(saved_step), _first_after(resumed, saved_step)
    if saved is None or resumed.restored is None:
        return
    after = straight.at(first.step) if first is not None else None
    for name, there in resumed.restored.outside.items():
        here = saved.now.outside.get(name)
        if here is None or here.parts == there.parts:
            continue
        wanted = after.now.outside.get(name) if after is not None else None
        got = first.now.outside.get(name) if first is not None else None
        yield LeftOutside(name, there, wanted is not None and got is not None and wanted.parts == got.parts)


def other_batches(straight: Trail, step: int, resumed: Boundary) -> dict[str, list[int]]:
    """Tensors in local variables that differ at `step` -> the other steps at which the straight launch had them."""
    there = straight.at(step)
    if there is None:
        return {}
    return {
        name: [each.step for each in straight.boundaries if each.now.locals.get(name) == got]
        for name, wanted, got in _differing(there.now.locals, resumed.now.locals)
        if wanted is not None and got is not None
    }


def learning_rates(boundary: Boundary) -> dict[str, str]:
    """Path -> rate, of the optimizers in the state and of those outside."""
    found = {path: value for path, value in boundary.now.state.items() if path.endswith("].lr")}
    for name, outside in boundary.now.outside.items():
        if outside.kind == "optimizer":
            found |= {f"{name}.{part}": value for part, value in outside.parts.items() if part.endswith("].lr")}
    return found


def differing_rates(straight: Boundary, resumed: Boundary) -> list[tuple[str, str, str]]:
    """(path, in the straight launch, in the resumed one)."""
    pairs = _differing(learning_rates(straight), learning_rates(resumed))
    return [(path, left, right) for path, left, right in pairs if left is not None and right is not None]


def _at_step(left: Trail, right: Trail, step: int) -> Iterator[Difference]:
    one, two = left.at(step), right.at(step)
    if one is None or two is None:
        return
    tensors = set(one.now.tensors) | set(two.now.tensors)

    def of(where: Where, pairs: Iterable[_Pair], kind: str = "") -> Iterator[Difference]:
        return (Difference(left.rank, step, where, name, before, after, kind) for name, before, after in pairs)

    yield from of("metric", _differing(one.metrics, two.metrics))
    of_state = list(_differing(one.now.state, two.now.state))
    yield from of("tensor", (pair for pair in of_state if pair[0] in tensors))
    yield from of("value", (pair for pair in of_state if pair[0] not in tensors))
    for name, there in one.now.outside.items():
        other = two.now.outside.get(name)
        if there.kind in TRAINS and other is not None and other.kind == there.kind:
            pairs = ((f"{name}.{part}", wanted, got) for part, wanted, got in _differing(there.parts, other.parts))
            yield from of("outside", pairs, there.kind)
    yield from of("rng", _differing(one.now.rng, two.now.rng))


def _differing(one: Mapping[str, str], two: Mapping[str, str]) -> Iterator[_Pair]:
    for name in dict.fromkeys([*one, *two]):
        if one.get(name) != two.get(name):
            yield name, one.get(name), two.get(name)


def _first_after(trail: Trail, step: int) -> Boundary | None:
    return next((boundary for boundary in trail.boundaries if boundary.step > step), None)


def _name(difference: Difference) -> str:
    return f"{difference.where} {difference.name}"
