"""The keys that the catalog's secrets are encrypted with: where the settings say they are, and what they do.

AES-256-GCM, with a random nonce for each text. What a text belongs to is authenticated with it, so a row's secret that
was copied into another row does not open there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast_service.settings import ServiceSettings, SettingsError

KEY_BYTES = 32
_NONCE_BYTES = 12
_COMMAND_SECONDS = 60
_FORM = "A key is 32 random bytes in base64 or hex: `openssl rand -base64 32`. Each stands on a line of its own."


class DecryptionError(Exception):
    """A text does not open. The message says why, and holds nothing of it."""


@dataclass(frozen=True)
class SecretsKey:
    key: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """Says which key it is, and nothing about it."""
        return hashlib.sha256(b"holdfast secrets key " + self.key).hexdigest()[:16]


@dataclass(frozen=True)
class Encrypted:
    """`key_id`: None if `text` is plain."""

    text: bytes = field(repr=False)
    key_id: str | None


class Keyring:
    """The first key encrypts, and all open. Without keys texts stay plain."""

    def __init__(self, keys: Sequence[SecretsKey] = ()) -> None:
        self._keys = {each.id: each for each in keys}
        self.current = keys[0] if keys else None

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._keys)

    def encrypt(self, text: bytes, owner: str) -> Encrypted:
        """`owner`: what it belongs to. It opens for the same owner alone."""
        if self.current is None:
            return Encrypted(text, None)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return Encrypted(nonce + AESGCM(self.current.key).encrypt(nonce, text, owner.encode()), self.current.id)

    def open(self, encrypted: Encrypted, owner: str) -> bytes:
        """Raises DecryptionError."""
        if encrypted.key_id is None:
            return encrypted.text
        key = self._keys.get(encrypted.key_id)
        if key is None:
            raise DecryptionError(f"this process does not have the key {encrypted.key_id}")
        nonce, text = encrypted.text[:_NONCE_BYTES], encrypted.text[_NONCE_BYTES:]
        try:
            return AESGCM(key.key).decrypt(nonce, text, owner.encode())
        except (InvalidTag, ValueError):
            raise DecryptionError(f"it was changed since it was encrypted with the key {encrypted.key_id}") from None


def key_settings(settings: ServiceSettings) -> list[str]:
    """Those that say where the keys are."""
    sources = {
        "HOLDFAST_SECRETS_KEY": settings.secrets_key,
        "HOLDFAST_SECRETS_KEY_FILE": settings.secrets_key_file,
        "HOLDFAST_SECRETS_KEY_COMMAND": settings.secrets_key_command,
    }
    return [name for name, value in sources.items() if value is not None]


def keyring_of(settings: ServiceSettings) -> Keyring:
    """Reads the file, or runs the command. Raises SettingsError, which names the setting and never holds a key."""
    given = key_settings(settings)
    if len(given) > 1:
        raise SettingsError(f"{' and '.join(given)} are set. Only one of them can say where the keys are; leave one.")
    if settings.secrets_key is not None:
        return Keyring(_keys_in(settings.secrets_key.get_secret_value(), given[0]))
    if settings.secrets_key_file is not None:
        try:
            text = settings.secrets_key_file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{given[0]}: {settings.secrets_key_file} cannot be read ({type(error).__name__}). {_FORM}"
            ) from None
        return Keyring(_keys_in(text, given[0]))
    if settings.secrets_key_command is not None:
        return Keyring(_keys_in(_printed(settings.secrets_key_command, given[0]), given[0]))
    return Keyring()


def _printed(command: str, setting: str) -> str:
    """What it says on stderr goes to the service's own."""
    try:
        words = shlex.split(command)
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, ValueError, IndexError) as error:
        raise SettingsError(
            f"{setting} cannot be run ({type(error).__name__}). Give a program and its words."
        ) from None
    except subprocess.TimeoutExpired:
        raise SettingsError(f"{setting} did not end within {_COMMAND_SECONDS} s. See what it waits for.") from None
    if done.returncode != 0:
        raise SettingsError(f"{setting} ended with {done.returncode}. Run it by hand as the service's user.")
    return done.stdout.decode("ascii", errors="replace")


def _keys_in(text: str, setting: str) -> list[SecretsKey]:
    lines = [line.strip() for line in text.splitlines()]
    keys = [_key(line, setting) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"{setting} gives no key. {_FORM}")
    return keys


def _key(line: str, setting: str) -> SecretsKey:
    try:
        key = bytes.fromhex(line) if re.fullmatch(r"[0-9a-fA-F]{64}", line) else base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES or len(set(key)) < KEY_BYTES // 4:
        raise SettingsError(f"{setting} gives something that is no key. {_FORM}")
    return SecretsKey(key)
