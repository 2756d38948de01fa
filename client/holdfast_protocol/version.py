"""The protocol's version, told by both sides in the `Holdfast-Protocol` header of every request and reply.

An older minor version is served; another major version is refused with both numbers (protocol rule 35).
"""

from __future__ import annotations

PROTOCOL_HEADER = "Holdfast-Protocol"
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
PROTOCOL_VERSION = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"


def speaks_with(other: str) -> bool:
    """Whether a peer that announces `other` ("major.minor") can be served. Malformed announcements cannot."""
    major, _, minor = other.partition(".")
    return major == str(PROTOCOL_MAJOR) and minor.isdigit()
