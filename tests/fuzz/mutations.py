"""What a hostile writer makes of a good document: bytes that are changed, and JSON with other values in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def damaged(draw: Any, originals: Sequence[bytes]) -> bytes:
    """One of them, with some bytes changed, put in or left out, or cut off."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("change", "put in", "leave out", "cut off"))):
            case "change":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "put in":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "leave out":
                del data[at : at + draw(st.integers(1, 8))]
            case _:
                del data[at:]
    return bytes(data)


@st.composite
def altered(draw: Any, document: Any) -> Any:
    """The document with a few of its values replaced, left out or repeated."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(("replace", "leave out", "repeat"))):
            case "leave out":
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "repeat":
                holder[draw(st.text(max_size=10))] = copy.deepcopy(holder[key])
            case _:
                holder[key] = draw(JSON)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each value, by what holds it and its key there."""
    within = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(within):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)
