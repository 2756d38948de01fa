"""Making a token and keeping it as a hash. Its text is shown once and is nowhere afterwards."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from holdfast_protocol.states import Scope
from holdfast_service.catalog.tables import Token
from holdfast_service.clock import database_now

_TOKEN = re.compile(r"^hold_(?P<id>[0-9a-f]{16})_(?P<secret>[0-9a-f]{64})\Z")
# A random secret of 64 hex digits has about 14 of the 16 digits many times; typed-in ones and repetitions do not.
_LEAST_DISTINCT_DIGITS = 10
_LEAST_DISTINCT_PAIRS = 32


def new_token_text() -> str:
    """`hold_<id>_<secret>`: 64 and 256 random bits."""
    return f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"


def parse_token(text: str) -> tuple[str, str]:
    """(id, SHA-256 of the secret). Raises ValueError for anything that is not a token; it does not repeat the text."""
    match = _TOKEN.match(text)
    if match is None:
        raise ValueError("a token is hold_, 16 lower-case hex digits, _ and 64 lower-case hex digits")
    return match["id"], hashlib.sha256(match["secret"].encode()).hexdigest()


def check_entropy(text: str) -> None:
    """Raises ValueError for a token that a person made up. Only for tokens that come from outside."""
    parse_token(text)
    secret = text.rpartition("_")[2]
    pairs = {secret[at : at + 2] for at in range(len(secret) - 1)}
    if len(set(secret)) < _LEAST_DISTINCT_DIGITS or len(pairs) < _LEAST_DISTINCT_PAIRS:
        raise ValueError(
            "its secret is not random; make one with `python -c 'import secrets; "
            'print(f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}")\'`'
        )


def token_row(
    session: Session,
    text: str,
    *,
    name: str,
    scopes: Iterable[Scope],
    project_id: str | None,
    expires_at: datetime | None,
    created_by_token: str | None = None,
) -> dict[str, Any]:
    """The columns of `tokens`. `created_by_token`: None for what is made at the database."""
    token_id, secret_sha256 = parse_token(text)
    return {
        "id": token_id,
        "name": name,
        "secret_sha256": secret_sha256,
        "project_id": project_id,
        "scopes": sorted({scope.value for scope in scopes}),
        "created_at": database_now(session),
        "created_by_token": created_by_token,
        "expires_at": expires_at,
        "revoked_at": None,
    }


def insert_token(
    session: Session,
    text: str,
    *,
    name: str,
    scopes: Iterable[Scope],
    project_id: str | None,
    expires_at: datetime | None,
    created_by_token: str | None = None,
) -> Token:
    row = token_row(
        session,
        text,
        name=name,
        scopes=scopes,
        project_id=project_id,
        expires_at=expires_at,
        created_by_token=created_by_token,
    )
    token = Token(**row)
    session.add(token)
    session.flush()
    return token
