"""When a sweep must not delete: what looks like very many orphans is more likely a catalog that has lost rows. Pure."""

from __future__ import annotations

from typing import NamedTuple

_FLOOR_OBJECTS = 20
_FLOOR_BYTES = 1024**3


class Amount(NamedTuple):
    objects: int = 0
    bytes: int = 0


def why_stop(whose: str, there: Amount, due: Amount, most_percent: float) -> str | None:
    """A sentence if `due` is more than the set share of what is `there`, by number or by bytes; else None. Below the
    floors it always goes: of a tiny store any orphan is a large share."""
    share = most_percent / 100
    many = due.objects > max(_FLOOR_OBJECTS, share * there.objects)
    large = due.bytes > max(_FLOOR_BYTES, share * there.bytes)
    if not many and not large:
        return None
    return (
        f"{due.objects} of {there.objects} objects ({due.bytes} of {there.bytes} bytes) of {whose} are orphans, more "
        f"than {most_percent:g} %, so nothing was deleted. See with `holdfast catalog check` whether the catalog "
        "has lost rows; if they are really nobody's, an administrator may sweep with --force."
    )
