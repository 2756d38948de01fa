"""The settings of every client, trainer and command: the service's URL, the token, retries, rates, the local tier.

Each is `HOLDFAST_<NAME>`; docs/settings.md is made from the descriptions below.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast_client.errors import ConfigurationError
from holdfast_client.logins import Login, file_of, read_login
from holdfast_protocol.states import Role
from holdfast_protocol.stores import is_this_machine

TOKEN_FILE = "token"  # noqa: S105


class ClientSettings(BaseSettings):
    """Read from the environment; a keyword wins over it. Raises ConfigurationError, which names the setting."""

    # Wrong values are never printed, because one of them may be a token.
    model_config = SettingsConfigDict(env_prefix="HOLDFAST_", extra="ignore", frozen=True, hide_input_in_errors=True)

    url: str = Field(default="http://127.0.0.1:8400", description="The service.")
    token: SecretStr | None = Field(
        default=None,
        description="The caller's token. Default: that of `holdfast login`, else on loopback the file `token` in the "
        "data folder.",
    )
    identity_token_file: Path | None = Field(
        default=None,
        description="Without HOLDFAST_TOKEN: a file with a token of the platform, such as a projected one of "
        "Kubernetes. The client exchanges it for a token of the service, and again before that one ends.",
    )
    identity_audience: str | None = Field(
        default=None,
        description="Without a token and such a file: the client asks the platform for a token with this audience, and "
        "exchanges it.",
    )
    identity_platform: Literal["github", "aws"] = Field(
        default="github",
        description="Whom HOLDFAST_IDENTITY_AUDIENCE is for. `github`: the runner of GitHub Actions, in a job with "
        "`id-token: write`. `aws`: STS, for the machine's or the task's IAM role; it needs boto3.",
    )
    identity_project: str | None = Field(
        default=None, description="The project that the exchanged token is for, if the identity may call for several."
    )
    identity_role: Role | None = Field(
        default=None, description="A narrower role of the exchanged token. Default: all that the rules give."
    )
    ca_file: Path | None = Field(
        default=None,
        description="Certificates, in PEM, of authorities that are trusted beside the usual ones: of the service, and "
        "of a store with a certificate of your own.",
    )
    client_certificate: Path | None = Field(
        default=None,
        description="The certificate, in PEM, that this client shows to a service that asks for one (mutual TLS). A "
        "file that is renewed is taken for new connections within seconds.",
    )
    client_key: Path | None = Field(
        default=None,
        description="The private key of HOLDFAST_CLIENT_CERTIFICATE in PEM, without a passphrase. Default: it stands "
        "in the certificate's file.",
    )
    timeout_seconds: float = Field(
        default=30.0, gt=0, description="The most that one request may take, and each pause within a transfer."
    )
    retry_seconds: float = Field(default=60.0, ge=0, description="How long one call is tried again before it fails.")
    max_bytes_per_second: int | None = Field(
        default=None,
        ge=65536,
        description="The most that one process sends and fetches per second, all together. Default: no limit.",
    )
    compress: Literal["none", "zstd"] = Field(
        default="none",
        description="`zstd`: chunks are compressed before they are sent, without loss, if that saves 5% or more.",
    )
    data_dir: Path = Field(default=Path("~/.holdfast"), description="The folder of an embedded service's token.")
    login_dir: Path = Field(
        default=Path("~/.config/holdfast/logins"),
        description="Where `holdfast login` keeps a token for each service, readable for this user alone. It counts if "
        "HOLDFAST_TOKEN is not set.",
    )
    direct_files: bool = Field(
        default=True, description="Read and write a mounted store's files without HTTP, if the mount is proven."
    )
    local_dir: Path | None = Field(
        default=None,
        description="The local tier: a folder on this node's own disk. A save is durable there first, and uploaded "
        "later. Without it saves go straight to the store.",
    )
    local_bytes: int | None = Field(
        default=None,
        gt=0,
        description="The most that the local tier keeps. Committed chunks that were unused for longest go first. "
        "Default: nine tenths of what it has and what is free on the disk when a process opens it.",
    )

    agent: Path | None = Field(
        default=None,
        description="The socket of this node's agent (`holdfast agent serve`). A save that it has taken is committed "
        "even if the job is killed. Without it, each rank uploads its own saves.",
    )
    agent_keep: int = Field(
        default=1,
        ge=0,
        description="For `holdfast agent serve`: states of each run that stay in memory for a relaunch while the next "
        "one is staged. Each costs the ranks their staging memory once more. With 0 a state stays until the next one "
        "is staged.",
    )

    agent_peers: int = Field(
        default=0,
        ge=0,
        description="For `holdfast agent serve`: the agents of so many other hosts of a job get a copy of each state, "
        "in memory. A host that takes a lost one's place reads it there. The agent listens on a port for that, and the "
        "bytes are not encrypted on the way. 0: no copies, and no port.",
    )
    agent_address: str | None = Field(
        default=None,
        description="With HOLDFAST_AGENT_PEERS: the address of this node on which its agent answers those of other "
        "hosts. Default: the one that this node sends from.",
    )
    agent_peer_bytes_per_second: int | None = Field(
        default=None,
        ge=1024**2,
        description="With HOLDFAST_AGENT_PEERS: the most that one agent copies from others per second. Default: no "
        "limit.",
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            setting = "HOLDFAST_" + "_".join(str(part) for part in first["loc"]).upper()
            raise ConfigurationError(
                f"{setting} is not usable: {first['msg'].removeprefix('Value error, ')}."
            ) from None

    @field_validator("url")
    @classmethod
    def _an_http_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it must look like http://host:port or https://host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("it must hold no user, password, query or fragment; the token goes into HOLDFAST_TOKEN")
        return url.rstrip("/")

    @field_validator("token")
    @classmethod
    def _a_header_value(cls, token: SecretStr | None) -> SecretStr | None:
        if token is None:
            return None
        text = token.get_secret_value().strip()
        if not text:
            return None
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("a token is one word of printable ASCII")
        return SecretStr(text)

    @field_validator(
        *("data_dir", "login_dir", "local_dir", "agent"),
        *("ca_file", "client_certificate", "client_key", "identity_token_file"),
    )
    @classmethod
    def _a_home_relative_path(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    def compressing(self, compress: str | None) -> Self:
        """These settings with another `compress`; None: unchanged. Raises ConfigurationError."""
        return self if compress is None else type(self)(**self.model_dump() | {"compress": compress})

    @property
    def on_loopback(self) -> bool:
        return is_this_machine(urlsplit(self.url).hostname or "")

    @property
    def has_identity(self) -> bool:
        """Whether calls go with a token that is exchanged for one of the platform."""
        return self.token is None and (self.identity_token_file is not None or self.identity_audience is not None)

    @property
    def token_file(self) -> Path:
        return self.data_dir / TOKEN_FILE

    @property
    def login_file(self) -> Path:
        return file_of(self.login_dir, self.url)

    def find_login(self) -> Login | None:
        """That of `holdfast login` for this service, if it counts. Raises ConfigurationError for a file that is not to
        be used."""
        return None if self.token is not None else read_login(self.login_file, self.url)

    def find_token(self) -> SecretStr | None:
        """The token that is set, else that of `holdfast login`, else on loopback the one that an embedded service left
        in its data folder.

        Each call looks for it until there is one: a trainer may start before the service has made its token.
        A token file is never sent to another machine.
        """
        login = self.find_login()
        if self.token is not None or login is not None or not self.on_loopback:
            return self.token if login is None else login.token
        try:
            stat = self.token_file.stat()
            text = _token_in(self.token_file, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"The token file {self.token_file} cannot be read ({type(error).__name__}). "
                "Set HOLDFAST_TOKEN, or HOLDFAST_DATA_DIR to the service's data folder."
            ) from None
        return SecretStr(text) if text else None


@functools.lru_cache(maxsize=8)
def _token_in(file: Path, _version: tuple[int, int, int]) -> str:
    # Opening and reading it takes the interpreter's lock from training as often as the rest of a call.
    return file.read_text(encoding="ascii").strip()
