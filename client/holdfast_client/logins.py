"""What `holdfast login` keeps: a token for each service, in a file for this user alone."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import stat
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_serializer

from holdfast_client.errors import ConfigurationError

_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Login(BaseModel):
    """`name`: as the service calls the token."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    url: str
    token: SecretStr
    token_id: str
    name: str
    expires_at: datetime | None

    @field_serializer("token", when_used="json")
    def _in_the_file(self, token: SecretStr) -> str:
        return token.get_secret_value()


def file_of(folder: Path, url: str) -> Path:
    """By the whole URL; the host is for who looks into the folder."""
    host = re.sub(r"[^a-z0-9.-]", "_", (urlsplit(url).hostname or "")[:100])
    return folder / f"{host}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"


def read_login(file: Path, url: str, *, to_revoke: bool = False) -> Login | None:
    """None: nobody has signed in there. Raises ConfigurationError for a file that is no login for this URL, and, unless
    it is `to_revoke`, for one that others can read."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({type(error).__name__}). {_ANEW}") from None
    if os.name == "posix" and found.st_mode & _OF_OTHERS and not to_revoke:
        raise ConfigurationError(
            f"{file} holds a token, and others on this machine can read it. Run `holdfast logout`, which revokes the "
            "token, and `holdfast login` again."
        )
    login = _read(file, (found.st_ino, found.st_mtime_ns, found.st_size))
    if login is None or login.url != url:
        raise ConfigurationError(f"{file} is no sign-in for {url}. {_ANEW}")
    return login


_ANEW = "Delete it, and run `holdfast login` again."


@functools.lru_cache(maxsize=8)
def _read(file: Path, _version: tuple[int, int, int]) -> Login | None:
    # Once for each version: a training job asks for its token with every call.
    try:
        return Login.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        return None


def keep_login(file: Path, login: Login) -> None:
    """Puts it in place whole. Only this user can read it, at every moment. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as content:
            content.write(login.model_dump_json() + "\n")
            content.flush()
            os.fsync(content.fileno())
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
