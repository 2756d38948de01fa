"""What each rule of a policy keeps, and in which words. Pure; the rules are those of restic's `forget`.

A checkpoint that is not healthy is judged by the same rules, but never takes a healthy one's place: with keep_last 3
the newest three healthy ones stay, and beside them what is unhealthy among the newest three of all. So a spell of
diverged saves neither pushes good ones out nor is lost to those who look into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from holdfast_protocol.retention import KeepBest, Reason, ReasonKind, RetentionPolicy
from holdfast_protocol.spans import parse_span
from holdfast_service.catalog.best import best_of, finite_value
from holdfast_service.retention.facts import Fact

Kept = Iterator[tuple[Fact, Reason]]


def kept_by_rules(policy: RetentionPolicy, committed: Sequence[Fact]) -> dict[str, list[Reason]]:
    """By id, each reason for which a rule keeps it. `committed` is newest first (facts.newest_first)."""
    reasons: dict[str, list[Reason]] = {}
    healthy = [fact for fact in committed if fact.healthy]
    for fact, reason in _selected(policy, healthy):
        reasons.setdefault(fact.id, []).append(reason)
    if len(healthy) < len(committed):
        for fact, reason in _selected(policy, committed):
            if not fact.healthy:
                reasons.setdefault(fact.id, []).append(reason)
    for best in policy.keep_best:
        for fact in committed:
            if finite_value(fact.metrics, best.metric) is None:
                what = (fact.metrics.get(best.metric) or {}).get("nonfinite") or "missing"
                reasons.setdefault(fact.id, []).append(Reason(ReasonKind.METRIC_MISSING, f"{best.metric} is {what}"))
    return reasons


def _selected(policy: RetentionPolicy, judged: Sequence[Fact]) -> Kept:
    if not judged:
        return
    newest = judged[0].at
    yield from _last(policy, judged)
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
        yield from _best(best, judged)
    wanted = set(policy.keep_labels)
    for fact in judged if wanted else ():
        if found := sorted(wanted.intersection(fact.labels)):
            yield fact, Reason(ReasonKind.KEEP_LABELS, f"has the label {', '.join(found)}")


def _last(policy: RetentionPolicy, judged: Sequence[Fact]) -> Kept:
    if policy.keep_last is None:
        return
    most = _number(policy.keep_last)
    for position, fact in enumerate(judged, 1):
        if most is not None and position > most:
            break
        yield fact, Reason(ReasonKind.KEEP_LAST, f"number {position} of the newest {policy.keep_last}")


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
            last, seen = name, seen + 1
            yield fact, Reason(kind, f"the newest of {name}")


def _best(best: KeepBest, judged: Sequence[Fact]) -> Kept:
    for position, fact in enumerate(best_of(judged, best, best.n), 1):
        value = finite_value(fact.metrics, best.metric)
        text = f"number {position} of the best {best.n} by {best.metric} ({best.mode}): {value:.6g}"
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
