"""What no policy expires, whatever its rules say, and what no person deletes. Pure (protocol rules 21, 26 and 29)."""

from __future__ import annotations

from holdfast_protocol.retention import Reason, ReasonKind
from holdfast_service.retention.facts import Fact, RunFacts, newest_first

HEALTHY_POINTS = 2
# What a person may delete of a run that has ended, if they say that they mean all of it.
FOR_THE_RUN_TO_GO_ON = frozenset(
    {ReasonKind.RESTORE_POINT, ReasonKind.NEWEST_HEALTHY, ReasonKind.NEWEST_COPIED, ReasonKind.RESUMED_FROM}
)


def protected(run: RunFacts) -> dict[str, list[Reason]]:
    """By id, each reason for which it must stay."""
    reasons: dict[str, list[Reason]] = {}
    newest = {fact.id for fact in newest_healthy(run)}
    copied = newest_copied(run)
    for fact in run.facts:
        found = list(_reasons(fact, run))
        if fact.id in newest:
            found.append(Reason(ReasonKind.NEWEST_HEALTHY, "one of the two newest healthy points"))
        if fact.id in copied:
            found.append(Reason(ReasonKind.NEWEST_COPIED, "the newest healthy point that is whole in another store"))
        if found:
            reasons[fact.id] = found
    return reasons


def newest_healthy(run: RunFacts) -> list[Fact]:
    """The two newest healthy points on the line of descent; where it has fewer, the newest beside it too: a run that
    has two healthy points never has fewer by our doing."""
    healthy = [fact for fact in run.facts if fact.healthy]
    on_line = sorted(
        (fact for fact in healthy if fact.on_line), key=lambda fact: (fact.step, fact.attempt, fact.at), reverse=True
    )
    beside = newest_first([fact for fact in healthy if not fact.on_line])
    return [*on_line, *beside][:HEALTHY_POINTS]


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
