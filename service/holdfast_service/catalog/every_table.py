"""Where `Table.metadata` is whole: for migrations, and for whoever empties a catalog."""

from __future__ import annotations

import holdfast_service.catalog.custody_tables  # noqa: F401  (adds its tables)
from holdfast_service.catalog.tables import Table

__all__ = ["Table"]
