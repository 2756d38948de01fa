"""Decides whether a cloud is asked, which one, and by which rank: one per node, and none if no cloud is seen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.distributed.ranks import Ranks
from holdfast.preemption.clouds.aws import Aws
from holdfast.preemption.clouds.azure import Azure
from holdfast.preemption.clouds.detect import detect_cloud
from holdfast.preemption.clouds.event import CloudSource
from holdfast.preemption.clouds.gcp import Gcp
from holdfast.preemption.clouds.metadata_server import BASE_URL, MetadataServer
from holdfast.preemption.clouds.poller import CloudPoller
from holdfast.preemption.notice import Notice
from holdfast.settings import TrainerSettings

log = logging.getLogger("holdfast")

_SOURCES: dict[str, Callable[[MetadataServer], CloudSource]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def start_poller(
    ranks: Ranks,
    settings: TrainerSettings,
    *,
    on_notice: Callable[[Notice], None],
    save_soon: Callable[[], None],
) -> CloudPoller | None:
    """None on every rank but the first of its node, and if no cloud is seen: then it makes no thread and no request.

    `save_soon`: answers a rebalance recommendation, unless HOLDFAST_PREEMPTION_REBALANCE says otherwise. That may come
    hours before an interruption that never comes, so by itself it is a reason to save, but not to leave.
    """
    if ranks.rank != ranks.host_leader:
        return None
    cloud = settings.preemption_cloud
    seen = detect_cloud() if cloud == "auto" else cloud
    if seen is None or seen == "none":
        return None

    def on_hint(hint: Notice) -> None:
        log.warning(
            "%s: %s (HOLDFAST_PREEMPTION_REBALANCE=%s)", hint.source, hint.reason, settings.preemption_rebalance
        )
        if settings.preemption_rebalance == "leave":
            on_notice(hint)
        elif settings.preemption_rebalance == "save":
            save_soon()

    server = MetadataServer(settings.metadata_url or BASE_URL)
    return CloudPoller(
        _SOURCES[seen](server),
        server,
        on_notice=on_notice,
        on_hint=on_hint,
        lead_seconds=settings.preemption_lead_seconds,
    )
