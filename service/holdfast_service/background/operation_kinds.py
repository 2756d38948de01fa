"""Every kind of operation, and the handler that carries it out. A verb registers its own by one line.

A handler is `handler(context, run) -> dict`: it moves bytes outside of transactions, calls `run.progress` between two
steps, may be begun again by another worker at any point, and returns the result as JSON values. What it raises becomes
the operation's reason: a ProblemError or a StoreError says what to do, anything else is told as a bug.
"""

from __future__ import annotations

import holdfast_service.catalog_check.check
import holdfast_service.collect.on_demand
import holdfast_service.replicate.drill
import holdfast_service.scrub.on_demand
from holdfast_service.work.operations import Handler

OPERATION_KINDS: dict[str, Handler] = {
    "catalog.check": holdfast_service.catalog_check.check.run_check,
    "collect": holdfast_service.collect.on_demand.run_collection,
    "sweep": holdfast_service.collect.on_demand.run_sweep,
    "drill": holdfast_service.replicate.drill.run_drill,
    "scrub": holdfast_service.scrub.on_demand.run_scrub,
}
