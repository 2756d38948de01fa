"""Shows the policy that holds: for a run its own, else its project's."""

from __future__ import annotations

from holdfast_protocol.policies import PolicyView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.policies import effective_policy
from holdfast_service.context import ServiceContext
from holdfast_service.policies.target import PolicyName, no_policy, target_of


def show_policy(context: ServiceContext, caller: Principal, name: PolicyName) -> PolicyView:
    """Raises `policy_not_found`, and what finding the target raises."""
    with context.database.read() as session:
        target = target_of(session, caller, name)
        policy = effective_policy(session, name.kind, target.project_id, target.run_id)
        if policy is None:
            raise no_policy(target, name.kind)
        return target.view(policy)
