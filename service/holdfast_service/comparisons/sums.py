"""Sums over two vectors, which add up over blocks, parts and tensors -> norms, cosine and counts. Pure."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import Any

from holdfast_protocol.index_documents import ITEM_BYTES

_MOST = sys.float_info.max
"""Stands for a sum that float64 cannot hold: JSON has no infinity."""


def is_measurable(dtype: str) -> bool:
    """Complex numbers are not, and two numbers in one byte are not."""
    return dtype in ITEM_BYTES and not dtype.startswith(("complex", "float4"))


@dataclass
class Sums:
    """Of two vectors. `before`, `after` and `difference`: sums of squares; `product`: of the elements' products."""

    elements: int = 0
    before: float = 0.0
    after: float = 0.0
    difference: float = 0.0
    product: float = 0.0
    largest: float = 0.0
    nan_before: int = 0
    nan_after: int = 0
    infinite_before: int = 0
    infinite_after: int = 0

    def add(self, other: Sums) -> None:
        largest = max(self.largest, other.largest)
        for each in fields(self):
            total = getattr(self, each.name) + getattr(other, each.name)
            setattr(self, each.name, total if isinstance(total, int) else held(total))
        self.largest = largest

    def told(self) -> dict[str, Any]:
        """As a Measured has it."""
        before, after, difference = map(_root, (self.before, self.after, self.difference))
        return {
            "elements": self.elements,
            "norm_before": before,
            "norm_after": after,
            "norm_difference": difference,
            "relative_change": _ratio(difference, before),
            "largest_difference": None if self.largest >= _MOST else self.largest,
            "cosine": None
            if not before or not after or abs(self.product) >= _MOST
            else max(-1.0, min(1.0, self.product / before / after)),
            "nan_before": self.nan_before,
            "nan_after": self.nan_after,
            "infinite_before": self.infinite_before,
            "infinite_after": self.infinite_after,
        }


def held(total: float) -> float:
    return total if abs(total) < _MOST else _MOST  # NaN as well: infinity less infinity


def _root(squares: float) -> float | None:
    return None if squares >= _MOST else math.sqrt(squares)


def _ratio(difference: float | None, before: float | None) -> float | None:
    if difference is None or before is None:
        return None
    if not before:
        return None if difference else 0.0
    ratio = difference / before
    return ratio if math.isfinite(ratio) else None
