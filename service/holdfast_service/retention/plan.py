"""Keep or expire, for each checkpoint of a run, with every reason. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from holdfast_protocol.digests import canonical_bytes
from holdfast_protocol.policies.retention import KeepBest, Reason, ReasonKind, RetentionPolicy, parse_span
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.lineage.best_and_proven import PROVEN_POINTS, best_of, finite_value
from holdfast_service.policies.policies import StoredPolicy

# What a decision about a checkpoint rests on; `read_facts` fills it from the catalog.


@dataclass(frozen=True, slots=True)
class Fact:
    """One checkpoint that is committed or uploading.

    `at`: when it was committed; of one that uploads, when it was begun. `metrics` as the catalog keeps them. `version`
    is the row's: a later action sees by it whether the fact still holds. `held`, `pin`, `read_until` and
    `resumed_by` are what is in force now. `copied_to`: the stores beside the primary that have all of it.
    `proven`: every byte was hashed by a store or the service; it is looked up for the newest healthy points, until two
    are found. `supposed`: it is corrupt, and is judged as if it were whole; it takes no place of another's.
    """

    id: str
    step: int
    attempt: int
    at: datetime
    state: CheckpointState = CheckpointState.COMMITTED
    health: Health = Health.OK
    on_line: bool = True
    labels: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    logical_bytes: int = 0
    version: int = 1
    held: Sequence[str] = ()
    pin: str | None = None
    read_until: datetime | None = None
    resumed_by: Sequence[int] = ()
    copied_to: Sequence[int] = ()
    proven: bool = True
    supposed: bool = False

    @property
    def committed(self) -> bool:
        return self.state is CheckpointState.COMMITTED

    @property
    def healthy(self) -> bool:
        return self.committed and self.health is Health.OK


@dataclass(frozen=True, slots=True)
class RunFacts:
    """`running`: an attempt has not ended. `restore_point`: the id of what a launch would resume from now. `read_at`:
    when the facts were read, by the clock that dates commits; None: none of them is dated later."""

    facts: Sequence[Fact]
    restore_point: str | None
    running: bool = False
    read_at: datetime | None = None


def newest_first(facts: Sequence[Fact]) -> list[Fact]:
    """By the moment of the commit, as restic orders snapshots; of the same moment the larger step first."""
    return sorted(facts, key=lambda fact: (fact.at, fact.step, fact.attempt, fact.id), reverse=True)


def _by_step(facts: Sequence[Fact]) -> list[Fact]:
    """The newest first by attempt and step: what is to be counted, for the clock may have gone back."""
    return sorted(facts, key=lambda fact: (fact.attempt, fact.step, fact.id), reverse=True)


Kept = Iterator[tuple[Fact, Reason]]


def kept_by_rules(
    policy: RetentionPolicy, committed: Sequence[Fact], read_at: datetime | None = None
) -> dict[str, list[Reason]]:
    """By id, each reason for which a rule keeps it. `committed` is newest first (`newest_first`). The rules are
    those of restic's `forget`.

    A checkpoint that is not healthy is judged by the same rules, but never takes a healthy one's place: with keep_last
    3 the newest three healthy ones stay, and beside them what is unhealthy among the newest three of all. A spell of
    diverged saves then neither pushes good ones out nor is lost to the people who look into it. The same holds for one
    that is dated later than `read_at`: the clock was ahead when it was committed, or is behind now.
    """
    reasons: dict[str, list[Reason]] = {}
    sound = [fact for fact in committed if fact.healthy and not _is_to_come(fact, read_at)]
    for fact, reason in _selected(policy, sound, read_at):
        reasons.setdefault(fact.id, []).append(reason)
    if len(sound) < len(committed):
        for fact, reason in _selected(policy, committed, read_at):
            if not fact.healthy or _is_to_come(fact, read_at):
                reasons.setdefault(fact.id, []).append(reason)
    for best in policy.keep_best:
        for fact in committed:
            if finite_value(fact.metrics, best.metric) is None:
                what = (fact.metrics.get(best.metric) or {}).get("nonfinite") or "missing"
                reasons.setdefault(fact.id, []).append(Reason(ReasonKind.METRIC_MISSING, f"{best.metric} is {what}"))
    return reasons


def _is_to_come(fact: Fact, read_at: datetime | None) -> bool:
    return read_at is not None and fact.at > read_at


def _counted_from(judged: Sequence[Fact], read_at: datetime | None) -> datetime:
    """The moment that spans count back from: the last commit's by attempt and step, for the clock may have been ahead
    at an earlier one. A wrong answer is too early, and keeps more."""

    def order(fact: Fact) -> tuple[int, int, datetime]:
        return fact.attempt, fact.step, fact.at

    dated = [fact for fact in judged if not _is_to_come(fact, read_at)] or judged[-1:]
    last = max((fact for fact in dated if not fact.supposed), key=order, default=None)
    return min(fact.at for fact in dated if last is None or order(fact) >= order(last))


def _placed(ranked: Iterable[Fact], most: int | None) -> Iterator[tuple[int, Fact]]:
    """The first `most` (None: all), each with its place. Each supposed one stands as it would alone."""
    place = 1
    for fact in ranked:
        if most is not None and place > most:
            return
        yield place, fact
        place += not fact.supposed


def _selected(policy: RetentionPolicy, judged: Sequence[Fact], read_at: datetime | None) -> Kept:
    if not judged:
        return
    newest = _counted_from(judged, read_at)
    yield from _last(policy, _by_step(judged))
    if policy.keep_within is not None:
        start = parse_span(policy.keep_within).before(newest)
        for fact in judged:
            if fact.at <= start:
                break
            yield fact, Reason(ReasonKind.KEEP_WITHIN, f"newer than {policy.keep_within} before the newest")
    for kind, count, span, period in _periods(policy):
        after = None if span is None else parse_span(span).before(newest)
        yield from _one_of_each(kind, period, judged, most=count, after=after)
    if policy.keep_every_steps is not None:
        for fact in judged:
            if fact.step % policy.keep_every_steps == 0:
                yield fact, Reason(ReasonKind.KEEP_EVERY_STEPS, f"a multiple of {policy.keep_every_steps}")
    for best in policy.keep_best:
        yield from _best(best, _by_step(judged))
    wanted = set(policy.keep_labels)
    for fact in judged if wanted else ():
        if found := sorted(wanted.intersection(fact.labels)):
            yield fact, Reason(ReasonKind.KEEP_LABELS, f"has the label {', '.join(found)}")


def _last(policy: RetentionPolicy, judged: Sequence[Fact]) -> Kept:
    if policy.keep_last is None:
        return
    for place, fact in _placed(judged, _number(policy.keep_last)):
        yield fact, Reason(ReasonKind.KEEP_LAST, f"number {place} of the newest {policy.keep_last}")


def _one_of_each(
    kind: ReasonKind,
    period: Callable[[datetime], str],
    judged: Sequence[Fact],
    *,
    most: int | None,
    after: datetime | None,
) -> Kept:
    """The newest of each period, as restic: periods without any checkpoint do not count."""
    seen, last = 0, None
    for fact in judged:
        if (after is not None and fact.at <= after) or (most is not None and seen == most):
            break
        name = period(fact.at.astimezone(UTC))
        if name != last:
            if not fact.supposed:
                last, seen = name, seen + 1
            yield fact, Reason(kind, f"the newest of {name}")


def _best(best: KeepBest, judged: Sequence[Fact]) -> Kept:
    for place, fact in _placed(best_of(judged, best, len(judged)), best.n):
        value = finite_value(fact.metrics, best.metric)
        text = f"number {place} of the best {best.n} by {best.metric} ({best.mode}): {value:.6g}"
        yield fact, Reason(ReasonKind.KEEP_BEST, text)


def _periods(
    policy: RetentionPolicy,
) -> Iterator[tuple[ReasonKind, int | None, str | None, Callable[[datetime], str]]]:
    for unit, period in _UNITS.items():
        count, span = getattr(policy, f"keep_{unit}"), getattr(policy, f"keep_within_{unit}")
        if count is not None:
            yield ReasonKind(f"keep_{unit}"), _number(count), None, period
        if span is not None:
            yield ReasonKind(f"keep_within_{unit}"), None, span, period


def _number(count: int | str) -> int | None:
    return count if isinstance(count, int) else None


def _week(at: datetime) -> str:
    year, week, _ = at.isocalendar()
    return f"week {year}-W{week:02}"


_UNITS: dict[str, Callable[[datetime], str]] = {
    "hourly": lambda at: f"{at:%Y-%m-%d %H}h",
    "daily": lambda at: f"{at:%Y-%m-%d}",
    "weekly": _week,
    "monthly": lambda at: f"{at:%Y-%m}",
    "yearly": lambda at: f"{at.year:04}",
}


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
    """By id, each reason for which it must stay: what no policy expires, whatever its rules say, and no person deletes.
    Pure (rules read-lease, trash-first, holds-outrank and two-verified-points).

    Two healthy points of a run stay, and they count only when they are proven: one whose bytes only its client has
    hashed may turn out to be worthless. While a run has fewer than two proven points, each healthy one stays.
    """
    reasons: dict[str, list[Reason]] = {}
    healthy = healthy_first(run.facts)
    newest = {fact.id for _, fact in _placed(healthy, HEALTHY_POINTS)}
    proven = {fact.id: place for place, fact in _placed((fact for fact in healthy if fact.proven), PROVEN_POINTS)}
    copied = newest_copied(run)
    for fact in run.facts:
        found = list(_protecting_reasons(fact, run))
        if fact.id in newest:
            found.append(Reason(ReasonKind.NEWEST_HEALTHY, "one of the two newest healthy points"))
        elif fact.id in proven:
            which = "the newest proven point" if proven[fact.id] == 1 else "one of the two newest proven points"
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
    """The healthy points, the newest first: those on the lineage, then those beside it. Where the line has
    fewer than must stay, what is beside it counts: a run that has two healthy points never has fewer by our doing."""
    healthy = [fact for fact in facts if fact.healthy]
    on_line = sorted(
        (fact for fact in healthy if fact.on_line), key=lambda fact: (fact.step, fact.attempt, fact.at), reverse=True
    )
    beside = _by_step([fact for fact in healthy if not fact.on_line])
    return [*on_line, *beside]


def newest_copied(run: RunFacts) -> set[str]:
    """What a launch would resume from in each store beside the primary while the primary is unavailable: copies lag
    behind, and the newest points may all be missing there."""
    copied: dict[int, list[Fact]] = {}
    for fact in sorted(run.facts, key=lambda fact: (fact.step, fact.attempt), reverse=True):
        for store_id in fact.copied_to if fact.healthy and fact.on_line else ():
            copied.setdefault(store_id, []).append(fact)
    return {fact.id for facts in copied.values() for _, fact in _placed(facts, 1)}


def _protecting_reasons(fact: Fact, run: RunFacts) -> list[Reason]:
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


_NO_RULE = (Reason(ReasonKind.NO_RULE, "no rule keeps it"),)
_NO_POLICY = Reason(ReasonKind.NO_POLICY, "there is no policy, so nothing expires")


@dataclass(frozen=True, slots=True)
class Decision:
    fact: Fact
    keep: bool
    reasons: Sequence[Reason]


def make_plan(policy: RetentionPolicy | None, run: RunFacts) -> list[Decision]:
    """Keep or expire, for each checkpoint of a run, with every reason, newest first. Pure: the same facts give the same
    plan. Without a policy everything is kept.

    A mark of corruption is taken back when the bytes turn up whole, and by a mark alone nothing expires: what would
    stay if it were whole, stays. Time comes in only by the facts (the moments of the commits, and when they were read)
    and never from a clock: two plans of the same facts are the same.
    """
    found = _reasons(policy, run)
    found = {**_were_they_whole(policy, run, found), **found}
    decisions = []
    for fact in newest_first(run.facts):
        reasons = list(found.get(fact.id, ()))
        if policy is None:
            reasons.insert(0, _NO_POLICY)
        decisions.append(Decision(fact, True, reasons) if reasons else Decision(fact, False, _NO_RULE))
    return decisions


def _reasons(policy: RetentionPolicy | None, run: RunFacts) -> dict[str, list[Reason]]:
    """By id of what stays."""
    committed = [fact for fact in newest_first(run.facts) if fact.committed]
    found = {} if policy is None else kept_by_rules(policy, committed, run.read_at)
    for checkpoint_id, reasons in protected(run).items():
        found.setdefault(checkpoint_id, []).extend(reasons)
    return found


def _were_they_whole(policy: RetentionPolicy | None, run: RunFacts, stays: Collection[str]) -> dict[str, list[Reason]]:
    """By id, of the corrupt ones that do not stay as it is: why it would, were it alone of them whole."""
    marked = [fact for fact in run.facts if fact.health is Health.CORRUPT and fact.id not in stays]
    if policy is None or not marked:
        return {}
    supposed = [replace(fact, health=Health.OK, proven=True, supposed=True) for fact in marked]
    found = _reasons(policy, replace(run, facts=[*(fact for fact in run.facts if fact.healthy), *supposed]))
    return {
        fact.id: [Reason(reason.kind, f"{reason.detail}, if its bytes turn up whole") for reason in found[fact.id]]
        for fact in supposed
        if fact.id in found
    }


def only_for_want_of_a_metric(decisions: Sequence[Decision]) -> int:
    """How many stay for no other reason than that a metric of keep_best is missing or not finite."""
    missing = {ReasonKind.METRIC_MISSING}
    return sum(1 for each in decisions if each.keep and {reason.kind for reason in each.reasons} == missing)


def policy_digest(policy: StoredPolicy) -> str:
    """What a plan was made from: the policy's version and its rules. `apply` refuses another (rule
    apply-what-was-shown)."""
    return hashlib.sha256(canonical_bytes([policy.level, policy.version, policy.document])).hexdigest()[:16]
