"""The parts of a request in the order and spelling that a V4 signature covers. Pure.

Amazon's SigV4 (s3/signer.py) and Google's GOOG4 (gcs/signer.py) agree about them, and differ in names and the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote


def encoded_query(query: Sequence[tuple[str, str]]) -> str:
    """As it goes over the wire, in the given order."""
    return joined(quoted_pairs(query))


def quoted_pairs(query: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs, because the canonical order is by name and then value: `a=` comes before `a0=`, and "a0=" before "a="."""
    return [(_quoted(name), _quoted(value)) for name, value in query]


def joined(pairs: Sequence[tuple[str, str]]) -> str:
    return "&".join([f"{name}={value}" for name, value in pairs])


@lru_cache(1024)
def _quoted(text: str) -> str:
    """Cached, because almost all of it is the same in every URL of a day, and quoting was most of a URL's cost."""
    return quote(text, safe="-_.~")


def canonical_headers(origin: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """The names as `a;b;c`, and one line each, with a line end after the last. `host` is added."""
    lines = {name: " ".join(value.split()) for name, value in headers.items()}
    lines["host"] = origin.partition("://")[2]
    names = sorted(lines)
    return ";".join(names), "".join(f"{name}:{lines[name]}\n" for name in names)
