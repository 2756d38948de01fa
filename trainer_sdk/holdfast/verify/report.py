"""A verification as text for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from holdfast.verify.evidence import Difference
from holdfast.verify.verification import Verdict, Verification

_SHOWN = 5
_DIGEST_LETTERS = 32
_REPEATABLE = (
    "A resumed run cannot repeat a run that does not repeat itself. Seed every generator before the first draw, use",
    "torch.use_deterministic_algorithms(True) and a fixed number of threads, and sort what comes from sets, folders",
    "and threads; then verify again.",
)
_WHAT = {
    "metric": "metric",
    "tensor": "tensor",
    "value": "value",
    "outside": "outside of the state",
    "rng": "random numbers",
}


def as_document(verification: Verification) -> dict[str, Any]:
    """Everything that the text says."""
    comparison = verification.comparison
    return {
        "verdict": verification.verdict.value,
        "saved_step": verification.saved_step,
        "ranks": verification.ranks,
        "tensors": verification.tensors,
        "metrics": verification.metrics,
        "compared_steps": comparison.compared_steps,
        "first_differing_step": comparison.step,
        "differences": [asdict(difference) for difference in comparison.first],
        "ignored": comparison.ignored,
        "causes": [asdict(cause) for cause in verification.causes],
    }


def as_text(verification: Verification) -> str:
    return "\n".join(_lines(verification))


def _lines(verification: Verification) -> Iterator[str]:
    comparison = verification.comparison
    ranks = "1 rank" if verification.ranks == 1 else f"{verification.ranks} ranks"
    if verification.verdict is Verdict.EXACT:
        metrics = (
            f"metrics {', '.join(verification.metrics)}" if verification.metrics else "no metrics (none were given)"
        )
        yield (
            f"EXACT: killed after step {verification.saved_step} and resumed, steps "
            f"{comparison.compared_steps[0]} to {comparison.compared_steps[-1]} are equal bit for bit on {ranks}:"
        )
        yield f"  {verification.tensors} tensors a rank, plain values, random numbers, {metrics}."
    elif verification.verdict is Verdict.NOTHING_SEEN:
        yield (
            f"NOTHING SEEN: killed after step {verification.saved_step} and resumed, nothing of the training was "
            f"compared: no tensor is in the state, and no metric was given that repeats itself ({ranks})."
        )
        yield '  Pass metrics={"loss": loss} to ckpt.step(), or put the model into the state; then verify again.'
    elif verification.verdict is Verdict.NOT_DETERMINISTIC:
        yield f"NOT DETERMINISTIC: two undisturbed launches differ at step {comparison.step}."
        yield from _differences(comparison.first, "first", "second")
        yield from (f"  {line}" for line in _REPEATABLE)
    else:
        what = "all that was compared is equal" if comparison.step is None else f"step {comparison.step} differs first"
        yield f"NOT EXACT: killed after step {verification.saved_step} and resumed, {what} ({ranks})."
        yield from _differences(comparison.first, "straight", "resumed")
        for at, cause in enumerate(verification.causes):
            yield f"{'Likely missing' if at == 0 else 'And'}: {cause.piece.value}" + (
                f", {cause.name}" if cause.name else ""
            )
            yield f"  because {cause.evidence}."
            yield f"  {cause.remedy}"
    if comparison.ignored:
        yield f"Left out, because undisturbed launches differ in them too: {', '.join(comparison.ignored[:_SHOWN])}."


def _differences(found: list[Difference], one: str, two: str) -> Iterator[str]:
    shown: list[Difference] = []
    for where in _WHAT:
        # A line or two of each kind say more than five tensors of one.
        shown += [difference for difference in found if difference.where == where][:2]
    for difference in shown[:_SHOWN]:
        rank = f", rank {difference.rank}" if difference.rank else ""
        line = f"  {_WHAT[difference.where]} {difference.name}{rank}"
        values = [value for value in (difference.straight, difference.resumed) if value is not None]
        if len(values) == 2 and all(len(value) < _DIGEST_LETTERS for value in values):
            line += f": {one} {values[0]}, {two} {values[1]}"
        elif len(values) < 2:
            line += f": only in the {one if difference.straight is not None else two} launch"
        yield line
    if len(found) > len(shown[:_SHOWN]):
        yield f"  and {len(found) - len(shown[:_SHOWN])} more at this step"
