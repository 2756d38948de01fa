"""Where `Table.metadata` is whole: for migrations, and for whoever empties a catalog."""

from __future__ import annotations

import holdfast_service.catalog.custody_tables
import holdfast_service.catalog.record_tables
import holdfast_service.catalog.webhook_tables  # noqa: F401  (all add their tables)
from holdfast_service.catalog.tables import Table

__all__ = ["Table"]
