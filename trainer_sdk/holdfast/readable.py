"""Numbers as the lines for people show them."""

from __future__ import annotations


def readable_bytes(count: int) -> str:
    """`1.5 GB`; powers of 1000, as disks and networks are sold."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"
