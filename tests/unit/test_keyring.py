"""Where the keys come from that the catalog's secrets are encrypted with, and that nothing else opens those."""

from __future__ import annotations

import base64
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.secrets.keyring import DecryptionError, Encrypted, Keyring, SecretsKey, keyring_of
from holdfast_service.serve import warn_of_plain_secrets
from holdfast_service.settings import ServiceSettings, SettingsError

OLD, NEW = SecretsKey(secrets.token_bytes(32)), SecretsKey(secrets.token_bytes(32))


def text_of(key: SecretsKey) -> str:
    return base64.b64encode(key.key).decode()


def test_the_first_key_encrypts_and_all_open() -> None:
    before = Keyring([OLD]).encrypt(b"a secret", "row 1")
    both = Keyring([NEW, OLD])
    assert both.open(before, "row 1") == b"a secret"
    after = both.encrypt(b"a secret", "row 1")
    assert (before.key_id, after.key_id) == (OLD.id, NEW.id)
    assert Keyring([NEW]).open(after, "row 1") == b"a secret"
    assert both.encrypt(b"a secret", "row 1").text != after.text, "equal secrets are not seen to be equal"
    with pytest.raises(DecryptionError, match=NEW.id):
        Keyring([OLD]).open(after, "row 1")


def test_what_was_changed_or_stands_in_another_row_does_not_open() -> None:
    keyring = Keyring([NEW])
    encrypted = keyring.encrypt(b"a secret", "row 1")
    with pytest.raises(DecryptionError, match="changed"):
        keyring.open(encrypted, "row 2")
    for at in (0, 12, len(encrypted.text) - 1):
        text = bytearray(encrypted.text)
        text[at] ^= 1
        with pytest.raises(DecryptionError, match="changed"):
            keyring.open(Encrypted(bytes(text), encrypted.key_id), "row 1")
    for short in (b"", encrypted.text[:12], encrypted.text[:20]):
        with pytest.raises(DecryptionError, match="changed"):
            keyring.open(Encrypted(short, encrypted.key_id), "row 1")


def test_without_a_key_it_stays_plain() -> None:
    assert Keyring().encrypt(b"a secret", "row 1") == Encrypted(b"a secret", None)
    assert Keyring([NEW]).open(Encrypted(b"a secret", None), "row 1") == b"a secret"
    assert Keyring().current is None


def test_nothing_shows_a_key() -> None:
    keys = Keyring([NEW])
    assert text_of(NEW) not in repr([NEW, keys, keys.encrypt(b"a", "b"), NEW.id])
    assert NEW.key.hex() not in NEW.id


@pytest.mark.parametrize("source", ["setting", "file", "command"])
def test_keys_come_from_a_setting_a_file_or_a_command(tmp_path: Path, source: str) -> None:
    lines = f"# the new one\n{text_of(NEW)}\n\n{OLD.key.hex()}\n"
    file = tmp_path / "keys"
    file.write_text(lines)
    given = {
        "setting": {"secrets_key": lines},
        "file": {"secrets_key_file": file},
        "command": {"secrets_key_command": f"{sys.executable} -c 'print(open(\"{file}\").read())'"},
    }[source]
    keyring = keyring_of(ServiceSettings(data_dir=tmp_path, **given))
    assert keyring.ids == {OLD.id, NEW.id}
    assert keyring.current == NEW


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"secrets_key": "hunter2hunter2"}, "HOLDFAST_SECRETS_KEY gives something that is no key"),
        ({"secrets_key": base64.b64encode(bytes(32)).decode()}, "HOLDFAST_SECRETS_KEY gives something that is no key"),
        ({"secrets_key": "# none"}, "HOLDFAST_SECRETS_KEY gives no key"),
        ({"secrets_key_file": Path("/nowhere/keys")}, "HOLDFAST_SECRETS_KEY_FILE: /nowhere/keys cannot be read"),
        ({"secrets_key_command": "false"}, "HOLDFAST_SECRETS_KEY_COMMAND ended with 1"),
        ({"secrets_key_command": "no-such-program-here"}, "HOLDFAST_SECRETS_KEY_COMMAND cannot be run"),
        ({"secrets_key_command": "echo 'unbalanced"}, "HOLDFAST_SECRETS_KEY_COMMAND cannot be run"),
        ({"secrets_key_command": " "}, "HOLDFAST_SECRETS_KEY_COMMAND cannot be run"),
        ({"secrets_key": text_of(NEW), "secrets_key_command": "true"}, "Only one of them"),
    ],
)
def test_what_gives_no_key_stops_the_start(tmp_path: Path, given: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        keyring_of(ServiceSettings(data_dir=tmp_path, **given))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"database_url": "postgresql+psycopg://localhost/holdfast"}, True),
        ({"host": "0.0.0.0", "secrets_key_file": "/etc/holdfast/secrets-key"}, False),
    ],
)
def test_a_service_for_others_says_at_its_start_that_its_secrets_are_plain(
    caplog: pytest.LogCaptureFixture, given: dict[str, Any], warns: bool
) -> None:
    warn_of_plain_secrets(ServiceSettings(**given))
    told = [str(record.msg) for record in caplog.records]
    assert [("HOLDFAST_SECRETS_KEY_FILE" in each) for each in told] == [True] * warns
