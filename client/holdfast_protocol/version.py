"""The protocol's version, told by both sides in the `Holdfast-Protocol` header of every request and reply.

An older minor version is served; another major version is refused with both numbers (protocol rule 35).
"""

from __future__ import annotations

PROTOCOL_HEADER = "Holdfast-Protocol"
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 4
"""1: chunks may be stored encoded (codecs.py). What an older client cannot decode is refused when it asks for it.
Saves may be pushed late (checkpoints.py); an older client never begins one.
2: custody: policies, trash, holds, copies in other stores, tiers, operations, audit events. An older client never asks
for them, and what it reads is as it was.
3: survival: attempts tell how they fare and why they ended; quarantine; advice on when to save; webhooks.
4: the fencing token names the launch. An older client is fenced by epoch and number alone.
"""
PROTOCOL_VERSION = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"

_LONGEST_MINOR = 6


def minor_of(other: str) -> int:
    """The minor version that a peer of our major version announces. Raises ValueError if it is malformed."""
    return int(other.partition(".")[2])


def speaks_with(other: str) -> bool:
    """Whether a peer that announces `other` ("major.minor") can be served. Malformed announcements cannot."""
    major, _, minor = other.partition(".")
    return major == str(PROTOCOL_MAJOR) and minor.isdecimal() and len(minor) <= _LONGEST_MINOR
