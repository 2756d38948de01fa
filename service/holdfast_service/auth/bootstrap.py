"""What a catalog must hold before the first request: who it is, and the first token.

Called at each start, after the migrations. Made once: two services that start at once end up with the same rows.
"""

from __future__ import annotations

import os
import secrets
import uuid
from pathlib import Path

from sqlalchemy import select

from holdfast_protocol.states import Scope
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import new_token_text, parse_token
from holdfast_service.auth.tokens import insert_token, token_facts, token_row
from holdfast_service.db.dialect import database_now, insert_absent, insert_new
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity, Token
from holdfast_service.secrets.kept import encrypted_signing_key
from holdfast_service.secrets.keyring import Keyring
from holdfast_service.stores.posix.signed_urls import new_signing_key

_ONLY_ROW = 1
BOOTSTRAP_NAME = "bootstrap"
_START = Actor.controller("start")


def ensure_identity(database: Database, keyring: Keyring) -> CatalogIdentity:
    """The catalog's id, epoch and signing key, as it is kept; made at the very first start."""
    with database.transaction() as session:
        if session.get(CatalogIdentity, _ONLY_ROW) is None:
            signing_key = encrypted_signing_key(keyring, new_signing_key())
            fresh = {
                "id": _ONLY_ROW,
                "catalog_id": uuid.uuid4().hex,
                "epoch": 1,
                "signing_key": signing_key.text,
                "encrypted_with": signing_key.key_id,
                "created_at": database_now(session),
            }
            insert_absent(session, CatalogIdentity, [fresh])
        # Read afterwards: another service that started at the same moment may have been first.
        return session.execute(select(CatalogIdentity)).scalar_one()


def ensure_token_file(database: Database, path: Path) -> bool:
    """The first token of an embedded service, left in a file that only its owner can read. True if it was made now.

    A file whose token this catalog does not know (a new catalog under an old data folder) is replaced.
    """
    try:
        known = _is_known(database, path.read_text(encoding="ascii").strip())
    except (FileNotFoundError, UnicodeDecodeError):
        known = False
    if known:
        return False
    text = new_token_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written whole under another name first: a client that looks meanwhile never reads half a token.
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        with database.transaction() as session:
            made = insert_token(session, text, name="embedded", scopes=Scope, project_id=None, expires_at=None)
            record_event(session, _START, "token.create", after=token_facts(made))
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return True


def ensure_bootstrap_token(database: Database, text: str) -> bool:
    """The first token of a service that is not embedded, as HOLDFAST_BOOTSTRAP_TOKEN gives it. True if it is new.

    A revoked token stays revoked, whatever the environment still says.
    """
    token_id, _ = parse_token(text)
    with database.transaction() as session:
        if session.get(Token, token_id) is not None:
            return False
        row = token_row(session, text, name=BOOTSTRAP_NAME, scopes=Scope, project_id=None, expires_at=None)
        if not insert_new(session, Token, [row], Token.id):
            return False  # another service that starts at this moment was first
        record_event(session, _START, "token.create", after=token_facts(Token(**row)))
        return True


def _is_known(database: Database, text: str) -> bool:
    try:
        token_id, secret_sha256 = parse_token(text)
    except ValueError:
        return False
    with database.read() as session:
        row = session.get(Token, token_id)
        return row is not None and row.secret_sha256 == secret_sha256 and row.revoked_at is None
