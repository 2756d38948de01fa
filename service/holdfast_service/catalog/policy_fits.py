"""Whether this service can do what a policy asks for: asked of the stores before the policy is kept."""

from __future__ import annotations

from holdfast_protocol.base import Request
from holdfast_protocol.copies import CopyPolicy
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import StoreRole
from holdfast_protocol.tiers import COLD_STORE, StorageClass, TierPolicy
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import StoreRefused
from holdfast_service.stores.storage_classes import ClassedStore


def refuse_unfit(context: ServiceContext, policy: Request) -> None:
    """Raises `invalid_request`, and StoreError if the store does not say. Never called inside a transaction."""
    if isinstance(policy, CopyPolicy) and context.attached(StoreRole.SECOND) is None:
        raise _unfit("A policy of copies needs a second store, and this service has none. Set HOLDFAST_SECOND_STORE.")
    if isinstance(policy, TierPolicy):
        for target in policy.targets():
            _refuse_unfit_target(context, target)


def _refuse_unfit_target(context: ServiceContext, target: str) -> None:
    if target == COLD_STORE:
        if context.attached(StoreRole.COLD) is None:
            raise _unfit(
                "`to: cold` needs a cold store, and this service has none. Set HOLDFAST_COLD_STORE, or use "
                "storage_class where the store is a bucket with classes."
            )
        return
    store = context.store
    if not isinstance(store, ClassedStore):
        raise _unfit(
            f"The store is {context.store.kind}, which has no storage class {target}. Set HOLDFAST_COLD_STORE to a "
            "second place, and use `to: cold`."
        )
    try:
        store.check_storage_class(StorageClass(target))
    except StoreRefused as error:
        raise _unfit(
            f"The store cannot keep anything in {target}: {error}. Use a class that it has, or set HOLDFAST_COLD_STORE "
            "and use `to: cold`."
        ) from error


def _unfit(detail: str) -> ProblemError:
    return ProblemError(ProblemCode.INVALID_REQUEST, detail, kind="tiers")
