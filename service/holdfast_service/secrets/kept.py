"""The secrets of the catalog's rows, encrypted if there is a key: the signing key, URL and secret of each webhook.

Tokens, sessions and sign-in codes are not among them: the catalog has only the SHA-256 of 256 random bits.

`encrypted_with` of a row names its key; null: it is plain. An empty text stays empty: there is no secret any more.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import structlog
from sqlalchemy import ColumnElement, or_, select

from holdfast_protocol.problems import ProblemCode
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.webhooks import Webhook
from holdfast_service.errors import ProblemError
from holdfast_service.secrets.keyring import DecryptionError, Encrypted, Keyring
from holdfast_service.settings import SettingsError

_AT_ONCE = 100
_SIGNING_KEY = "catalog_identity.signing_key"

_log = structlog.get_logger("holdfast.secrets")


def encrypted_signing_key(keyring: Keyring, key: bytes) -> Encrypted:
    return keyring.encrypt(key, _SIGNING_KEY)


def keep_signing_key(keyring: Keyring, identity: CatalogIdentity, key: bytes) -> None:
    encrypted = encrypted_signing_key(keyring, key)
    identity.signing_key, identity.encrypted_with = encrypted.text, encrypted.key_id


def signing_key_of(keyring: Keyring, identity: CatalogIdentity) -> bytes:
    """Raises DecryptionError."""
    return keyring.open(Encrypted(identity.signing_key, identity.encrypted_with), _SIGNING_KEY)


@dataclass(frozen=True)
class HookSecrets:
    """`url` is one too: many receivers know their callers by its path or its query."""

    url: str
    secret: bytes


def keep_hook(keyring: Keyring, hook: Webhook, kept: HookSecrets) -> None:
    """`hook` has its id."""
    hook.url, hook.secret, hook.encrypted_with = kept.url, kept.secret, None
    if keyring.current is None:
        return
    hook.encrypted_with = keyring.current.id
    if kept.url:
        encrypted_url = keyring.encrypt(kept.url.encode(), f"webhooks.url {hook.id}")
        hook.url = base64.b64encode(encrypted_url.text).decode()
    if kept.secret:
        hook.secret = keyring.encrypt(kept.secret, f"webhooks.secret {hook.id}").text


def hook_secrets(keyring: Keyring, hook: Webhook) -> HookSecrets:
    """Raises DecryptionError."""
    if hook.encrypted_with is None:
        return HookSecrets(hook.url, hook.secret)
    url, secret = "", b""
    if hook.url:
        try:
            encrypted_url = Encrypted(base64.b64decode(hook.url, validate=True), hook.encrypted_with)
        except ValueError:
            raise DecryptionError("it was changed since it was encrypted") from None
        url = keyring.open(encrypted_url, f"webhooks.url {hook.id}").decode()
    if hook.secret:
        secret = keyring.open(Encrypted(hook.secret, hook.encrypted_with), f"webhooks.secret {hook.id}")
    return HookSecrets(url, secret)


def settle_secrets(database: Database, keyring: Keyring) -> bytes:
    """At each start: what is plain is encrypted if there is a key. Returns the signing key. Raises SettingsError if
    something is encrypted with a key that is not here: a service must not go on with half of its secrets."""
    _refuse_if_lacking(database, keyring)
    if keyring.current is not None:
        try:
            count = encrypt_anew(database, keyring, only_plain=True)
        except ProblemError as error:
            if error.code is not ProblemCode.CATALOG_READ_ONLY:
                raise
            _log.warning("secrets_stay_plain", reason="The catalog takes no writes now.")
        else:
            if count:
                _log.info("secrets_encrypted", rows=count, key=keyring.current.id)
    with database.read() as session:
        identity = session.execute(select(CatalogIdentity)).scalar_one()
    try:
        return signing_key_of(keyring, identity)
    except DecryptionError as error:
        raise SettingsError(
            f"The catalog's signing key does not open: {error}. Restore the row of `catalog_identity` from a backup."
        ) from None


def _refuse_if_lacking(database: Database, keyring: Keyring) -> None:
    lacking = _keys_used(database) - keyring.ids
    if lacking:
        raise SettingsError(
            "HOLDFAST_SECRETS_KEY_FILE, HOLDFAST_SECRETS_KEY or HOLDFAST_SECRETS_KEY_COMMAND must give the key "
            f"{', '.join(sorted(lacking))}: secrets of this catalog are encrypted with it. Give the one that its other "
            "services have, beside a newer one. If it is lost, `holdfast admin rotate-secrets --lost-key` gives up "
            "what it has encrypted."
        )


def encrypt_anew(database: Database, keyring: Keyring, *, only_plain: bool = False) -> int:
    """Encrypts with the current key what is plain or encrypted with another one, while services run: they have both
    keys, and open each row with its own. Repeatable after a kill at any point. Returns how many rows. Raises
    DecryptionError for what was changed, and for a key that is not here."""
    count = _encrypt_identity(database, keyring, only_plain=only_plain)
    due = _is_due(Webhook, keyring, only_plain=only_plain)
    with database.read() as session:
        if session.scalar(select(Webhook.id).where(due).limit(1)) is None:
            return count  # most starts lock nothing, and a catalog that takes no writes can be read
    last = ""
    while True:
        with database.transaction() as session:
            hooks = session.scalars(
                select(Webhook).where(Webhook.id > last, due).order_by(Webhook.id).limit(_AT_ONCE).with_for_update()
            ).all()
            for hook in hooks:
                keep_hook(keyring, hook, hook_secrets(keyring, hook))
            if not hooks:
                return count
            last, count = hooks[-1].id, count + len(hooks)


def rotate(database: Database, keyring: Keyring, actor: Actor) -> int:
    """Encrypts everything with the first key. Returns how many rows were not. Raises SettingsError, also without a
    key."""
    if keyring.current is None:
        raise SettingsError(
            "HOLDFAST_SECRETS_KEY_FILE, HOLDFAST_SECRETS_KEY or HOLDFAST_SECRETS_KEY_COMMAND must give the new key, on "
            "the first line, and the old one on the next."
        )
    _refuse_if_lacking(database, keyring)
    try:
        count = encrypt_anew(database, keyring)
    except DecryptionError as error:
        raise SettingsError(f"A secret of the catalog does not open: {error}. Restore its row from a backup.") from None
    with database.transaction() as session:
        record_event(session, actor, "secrets.rotate", after={"key": keyring.current.id, "rows": count})
    return count


@dataclass(frozen=True)
class GivenUp:
    signing_key: bool
    webhooks: int


def give_up_lost(database: Database, keyring: Keyring, new_signing_key: bytes, actor: Actor) -> GivenUp:
    """Takes away what is encrypted with keys that are not here. The signing key is drawn anew: URLs that it has signed
    end with it, and services are to be started again. Such webhooks are deleted, and made anew by their owners."""
    with database.transaction() as session:
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one()
        lost_signing_key = identity.encrypted_with is not None and identity.encrypted_with not in keyring.ids
        if lost_signing_key:
            keep_signing_key(keyring, identity, new_signing_key)
        hooks = session.scalars(
            select(Webhook)
            .where(Webhook.encrypted_with.is_not(None), Webhook.encrypted_with.not_in(sorted(keyring.ids)))
            .with_for_update()
        ).all()
        now = database_now(session)
        for hook in hooks:
            hook.deleted_at = hook.deleted_at or now
            keep_hook(keyring, hook, HookSecrets("", b""))
        given_up = GivenUp(lost_signing_key, len(hooks))
        if lost_signing_key or hooks:
            after = {"signing_key": lost_signing_key, "webhooks": [hook.id for hook in hooks]}
            record_event(session, actor, "secrets.give_up", after=after)
        return given_up


def _encrypt_identity(database: Database, keyring: Keyring, *, only_plain: bool) -> int:
    due = _is_due(CatalogIdentity, keyring, only_plain=only_plain)
    with database.read() as session:
        if session.scalar(select(CatalogIdentity.id).where(due)) is None:
            return 0  # most starts: its row is one that every save reads
    with database.transaction() as session:
        identity = session.scalar(select(CatalogIdentity).where(due).with_for_update())
        if identity is None:  # another process was first
            return 0
        keep_signing_key(keyring, identity, signing_key_of(keyring, identity))
        return 1


def _is_due(table: type[CatalogIdentity | Webhook], keyring: Keyring, *, only_plain: bool) -> ColumnElement[bool]:
    assert keyring.current is not None
    plain = table.encrypted_with.is_(None)
    return plain if only_plain else or_(plain, table.encrypted_with != keyring.current.id)


def _keys_used(database: Database) -> set[str]:
    with_something = or_(Webhook.url != "", Webhook.secret != b"")
    with database.read() as session:
        used = {
            *session.scalars(select(CatalogIdentity.encrypted_with)),
            *session.scalars(select(Webhook.encrypted_with).where(with_something).distinct()),
        }
    return {key_id for key_id in used if key_id is not None}
