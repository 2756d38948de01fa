"""Takes secrets out of text that is kept and shown: anybody's error message may hold a URL with a signature in it."""

from __future__ import annotations

import re

_SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE), r"\1***@"),  # user and password of a URL
    (re.compile(r"(/[^\s?'\"]*)\?[^\s'\"]+"), r"\1?***"),  # the query of a URL, or of a path
    (re.compile(r"hold_[0-9a-f]{16}_[0-9a-zA-Z]+"), "hold_***"),
    (re.compile(r"whsec_[A-Za-z0-9+/=]+"), "whsec_***"),
)


def without_secrets(text: str) -> str:
    """`text` without URLs' queries and passwords, and without our tokens and webhooks' secrets. Twice is fine."""
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text
