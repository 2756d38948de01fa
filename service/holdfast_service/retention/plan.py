"""Keep or expire, for each checkpoint of a run, with every reason. Pure: the same facts give the same plan.

A mark of corruption is taken back when the bytes turn up whole, so by a mark alone nothing expires: what would stay if
it were whole, stays.

Time comes in only by the facts (the moments of the commits) and never from a clock: whoever plans twice sees the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from holdfast_protocol.canonical_json import canonical_bytes
from holdfast_protocol.retention import Reason, ReasonKind, RetentionPolicy
from holdfast_protocol.states import Health
from holdfast_service.catalog.policies import StoredPolicy
from holdfast_service.retention.facts import Fact, RunFacts, newest_first
from holdfast_service.retention.protect import protected
from holdfast_service.retention.rules import kept_by_rules

_NO_RULE = (Reason(ReasonKind.NO_RULE, "no rule keeps it"),)
_NO_POLICY = Reason(ReasonKind.NO_POLICY, "there is no policy, so nothing expires")


@dataclass(frozen=True, slots=True)
class Decision:
    fact: Fact
    keep: bool
    reasons: Sequence[Reason]


def make_plan(policy: RetentionPolicy | None, run: RunFacts) -> list[Decision]:
    """Newest first. Without a policy everything is kept."""
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
    found = {} if policy is None else kept_by_rules(policy, committed)
    for checkpoint_id, reasons in protected(run).items():
        found.setdefault(checkpoint_id, []).extend(reasons)
    return found


def _were_they_whole(policy: RetentionPolicy | None, run: RunFacts, stays: Collection[str]) -> dict[str, list[Reason]]:
    """By id, of the corrupt ones that do not stay as it is: why they would, were they whole.

    Of several any one may be whole again and the others lost, so those that were found to stay are taken out, and the
    rest is judged anew, until none is found.
    """
    marked = [fact for fact in run.facts if fact.health is Health.CORRUPT and fact.id not in stays]
    if policy is None or not marked:
        return {}
    others = [fact for fact in run.facts if fact.healthy]
    kept: dict[str, list[Reason]] = {}
    while marked:
        as_if = [*others, *(replace(fact, health=Health.OK, proven=True) for fact in marked)]
        found = _reasons(policy, replace(run, facts=as_if))
        again = [fact for fact in marked if fact.id not in found]
        if len(again) == len(marked):
            break
        for fact in marked:
            if fact.id in found:
                kept[fact.id] = [
                    Reason(reason.kind, f"{reason.detail}, if its bytes turn up whole") for reason in found[fact.id]
                ]
        marked = again
    return kept


def only_for_want_of_a_metric(decisions: Sequence[Decision]) -> int:
    """How many stay for no other reason than that a metric of keep_best is missing or not finite."""
    missing = {ReasonKind.METRIC_MISSING}
    return sum(1 for each in decisions if each.keep and {reason.kind for reason in each.reasons} == missing)


def policy_digest(policy: StoredPolicy) -> str:
    """What a plan was made from: the policy's version and its rules. `apply` refuses another (protocol rule 27)."""
    return hashlib.sha256(canonical_bytes([policy.level, policy.version, policy.document])).hexdigest()[:16]
