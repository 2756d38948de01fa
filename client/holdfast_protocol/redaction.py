"""Takes secrets out of text that is kept and shown: anybody's error message may hold a URL with a signature in it."""

from __future__ import annotations

import re

_SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE), r"\1"),  # user and password of a URL
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*)\?[^\s'\"]+", re.IGNORECASE), r"\1"),  # its query
    (re.compile(r"\bhold_[0-9a-f]{16}_[0-9a-f]{64}\b"), "a token"),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=]+"), "a secret"),
)


def without_secrets(text: str) -> str:
    """`text` without URLs' queries and passwords, and without our tokens and webhooks' secrets."""
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text
