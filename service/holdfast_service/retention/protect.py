"""What no policy expires, whatever its rules say, and what no person deletes. Pure (protocol rules 21, 26, 29, 39).

Two healthy points of a run stay, and they count only when they are proven: one whose bytes nobody but its client has
hashed may turn out to be worthless. So while a run has fewer than two proven points, each healthy one stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_protocol.retention import Reason, ReasonKind
from holdfast_service.catalog.proven import PROVEN_POINTS
from holdfast_service.retention.facts import Fact, RunFacts, newest_first

HEALTHY_POINTS = 2
# What a person may delete of a run that has ended, if they say that they mean all of it.
FOR_THE_RUN_TO_GO_ON = frozenset(
    {
        ReasonKind.RESTORE_POINT,
        ReasonKind.NEWEST_HEALTHY,
        ReasonKind.NEWEST_PROVEN,
        ReasonKind.UNPROVEN,
        ReasonKind.NEWEST_COPIED,
        ReasonKind.RESUMED_FROM,
    }
)


def protected(run: RunFacts) -> dict[str, list[Reason]]:
    """By id, each reason for which it must stay."""
    reasons: dict[str, list[Reason]] = {}
    healthy = healthy_first(run.facts)
    newest = {fact.id for fact in healthy[:HEALTHY_POINTS]}
    proven = [fact.id for fact in healthy if fact.proven][:PROVEN_POINTS]
    copied = newest_copied(run)
    for fact in run.facts:
        found = list(_reasons(fact, run))
        if fact.id in newest:
            found.append(Reason(ReasonKind.NEWEST_HEALTHY, "one of the two newest healthy points"))
        elif fact.id in proven:
            which = "the newest proven point" if fact.id == proven[0] else "one of the two newest proven points"
            found.append(Reason(ReasonKind.NEWEST_PROVEN, which))
        elif fact.healthy and len(proven) < PROVEN_POINTS:
            found.append(
                Reason(
                    ReasonKind.UNPROVEN, f"not proven yet, and {len(proven)} of {PROVEN_POINTS} points of the run are"
                )
            )
        if fact.id in copied:
            found.append(Reason(ReasonKind.NEWEST_COPIED, "the newest healthy point that is whole in another store"))
        if found:
            reasons[fact.id] = found
    return reasons


def healthy_first(facts: Sequence[Fact]) -> list[Fact]:
    """The healthy points, the newest first: those on the line of descent, then those beside it. Where the line has
    fewer than must stay, what is beside it counts: a run that has two healthy points never has fewer by our doing."""
    healthy = [fact for fact in facts if fact.healthy]
    on_line = sorted(
        (fact for fact in healthy if fact.on_line), key=lambda fact: (fact.step, fact.attempt, fact.at), reverse=True
    )
    beside = newest_first([fact for fact in healthy if not fact.on_line])
    return [*on_line, *beside]


def newest_copied(run: RunFacts) -> set[str]:
    """Of each store beside the primary, what a launch would resume from while the primary is away: copies lag behind,
    and the newest points may all be missing there."""
    newest: dict[int, Fact] = {}
    for fact in run.facts:
        for store_id in fact.copied_to if fact.healthy and fact.on_line else ():
            if store_id not in newest or (fact.step, fact.attempt) > (newest[store_id].step, newest[store_id].attempt):
                newest[store_id] = fact
    return {fact.id for fact in newest.values()}


def _reasons(fact: Fact, run: RunFacts) -> list[Reason]:
    reasons = []
    if not fact.committed:
        reasons.append(Reason(ReasonKind.UPLOADING, "it is still uploading"))
    if fact.id == run.restore_point:
        reasons.append(Reason(ReasonKind.RESTORE_POINT, "the restore point"))
    if fact.resumed_by:
        attempts = ", ".join(map(str, sorted(fact.resumed_by)))
        reasons.append(Reason(ReasonKind.RESUMED_FROM, f"attempt {attempts} resumed from it"))
    if fact.read_until is not None:
        reasons.append(Reason(ReasonKind.BEING_READ, f"being read, until {fact.read_until:%Y-%m-%d %H:%M} UTC at most"))
    if fact.pin is not None:
        reasons.append(Reason(ReasonKind.PINNED, f"pinned {fact.pin}"))
    reasons.extend(Reason(ReasonKind.HELD, f"held {why}") for why in fact.held)
    return reasons
