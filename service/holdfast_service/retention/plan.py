"""Keep or expire, for each checkpoint of a run, with every reason. Pure: the same facts give the same plan.

Time comes in only by the facts (the moments of the commits) and never from a clock: whoever plans twice sees the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_protocol.canonical_json import canonical_bytes
from holdfast_protocol.retention import Reason, ReasonKind, RetentionPolicy
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
    ordered = newest_first(run.facts)
    by_rule = {} if policy is None else kept_by_rules(policy, [fact for fact in ordered if fact.committed])
    by_right = protected(run)
    decisions = []
    for fact in ordered:
        reasons = [*by_rule.get(fact.id, ()), *by_right.get(fact.id, ())]
        if policy is None:
            reasons.insert(0, _NO_POLICY)
        decisions.append(Decision(fact, True, reasons) if reasons else Decision(fact, False, _NO_RULE))
    return decisions


def only_for_want_of_a_metric(decisions: Sequence[Decision]) -> int:
    """How many stay for no other reason than that a metric of keep_best is missing or not finite."""
    missing = {ReasonKind.METRIC_MISSING}
    return sum(1 for each in decisions if each.keep and {reason.kind for reason in each.reasons} == missing)


def policy_digest(policy: StoredPolicy) -> str:
    """What a plan was made from: the policy's version and its rules. `apply` refuses another (protocol rule 27)."""
    return hashlib.sha256(canonical_bytes([policy.level, policy.version, policy.document])).hexdigest()[:16]
