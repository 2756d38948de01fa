"""The catalog's tables, by subject. Importing this package makes `Table.metadata` whole."""

from __future__ import annotations

import holdfast_service.db.tables.curves
import holdfast_service.db.tables.events
import holdfast_service.db.tables.identities
import holdfast_service.db.tables.operations
import holdfast_service.db.tables.records
import holdfast_service.db.tables.samples
import holdfast_service.db.tables.sign_ins
import holdfast_service.db.tables.tallies
import holdfast_service.db.tables.webhooks  # noqa: F401  (all add their tables)
from holdfast_service.db.tables.core import Table

__all__ = ["Table"]
