"""The service's settings: read once at the start, from the environment, and handed down in the context.

Each is `HOLDFAST_<NAME>`; `holdfast serve --print-settings` prints the table that this module's descriptions make.
A wrong value, and an unknown name, stop the start with a sentence that names the setting.
"""

from __future__ import annotations

import difflib
import grp
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from holdfast_protocol.states import StoreRole
from holdfast_service.stores.base import Credentials

PREFIX = "HOLDFAST_"
# Client and trainer read these; on one machine they share the service's environment, so they are no mistake here.
OTHERS_SETTINGS = frozenset(
    {"URL", "TOKEN", "TIMEOUT_SECONDS", "RETRY_SECONDS", "MAX_BYTES_PER_SECOND", "DIRECT_FILES", "COMPRESS"}
    | {"CA_FILE", "CLIENT_CERTIFICATE", "CLIENT_KEY"}
    | {"LOGIN_DIR", "IDENTITY_TOKEN_FILE", "IDENTITY_AUDIENCE", "IDENTITY_PLATFORM"}
    | {"IDENTITY_PROJECT", "IDENTITY_ROLE"}
    | {"RUN", "COLLECTIVE_TIMEOUT_SECONDS", "DRAIN_SECONDS", "SAVE_RETRY_SECONDS", "TRANSFERS"}
    | {"HOST_MEMORY_BYTES", "CACHE_DIR", "CACHE_BYTES", "LOCAL_DIR", "LOCAL_BYTES", "AGENT"}
    | {"SWARM", "SWARM_ADDRESS"}
    | {"AGENT_WAIT_SECONDS", "AGENT_KEEP", "AGENT_PEERS", "AGENT_ADDRESS", "AGENT_PEER_BYTES_PER_SECOND"}
    | {"LAUNCH", "OUTCOME_DIR", "VERIFY_DIR"}
    | {"PREEMPTION_AGREE_SECONDS", "PREEMPTION_GRACE_SECONDS", "PREEMPTION_LEAD_SECONDS"}
    | {"PREEMPTION_CLOUD", "PREEMPTION_REBALANCE", "PREEMPTION_SIGNALS", "METADATA_URL"}
)


class SettingsError(ValueError):
    """A setting cannot be used. The message names it and says what to do; it never repeats a secret."""


class ServiceSettings(BaseSettings):
    """A keyword wins over the environment. Raises SettingsError."""

    # Bad values are never echoed: one of them may hold a password.
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    database_url: SecretStr | None = Field(
        default=None,
        description="The catalog: `sqlite:///path` or `postgresql://user:password@host/name`. "
        "Default: SQLite in the data folder.",
    )
    database_statement_seconds: float = Field(
        default=60.0,
        gt=0,
        description="No statement takes longer on Postgres, waiting for locks included, and no transaction stands idle "
        "longer; a server that does not answer is given up a little later. Migrations have no limit.",
    )
    migrate_at_start: bool = Field(
        default=True,
        description="A service, worker or command brings an older catalog up to date at its start. `false` for a "
        "fleet: it refuses to start until `holdfast admin migrate` has done it.",
    )
    database_connections: int = Field(
        default=50,
        ge=5,
        description="Connections to Postgres, at most, of each process. A call that finds them all in use for 20 s is "
        "told to retry.",
    )
    store: str | None = Field(
        default=None,
        description="Where chunks live: `posix:///path`, `s3://bucket/prefix?endpoint=…&region=…`, "
        "`gs://bucket/prefix` or `az://container/prefix?account=…`, without credentials. Default: a folder in the "
        "data folder.",
    )
    store_group: str | None = Field(
        default=None,
        description="The group (a name or a number) that shares a posix store with the service: its members read "
        "chunks from the mount and hand files over. Default: only the service's own user can enter the folder.",
    )
    second_store: str | None = Field(
        default=None,
        description="A further store, as HOLDFAST_STORE: another region, another cloud or a mounted filesystem, for "
        "copies that outlive the first. Projects say what is copied there.",
    )
    second_store_access_key_id: str | None = Field(
        default=None,
        description="The second store's own S3 key, where it is not the one that the environment gives (AWS_…). Or "
        "name a profile of the AWS configuration in the URL: `?profile=…`. For Azure the name of the account.",
    )
    second_store_secret_access_key: SecretStr | None = Field(
        default=None,
        description="The secret that belongs to HOLDFAST_SECOND_STORE_ACCESS_KEY_ID. For Azure the account's key.",
    )
    cold_store: str | None = Field(
        default=None,
        description="A store for what is seldom read, as HOLDFAST_STORE. A bucket with storage classes needs none.",
    )
    data_dir: Path = Field(
        default=Path("~/.holdfast"), description="The data folder: catalog, store and token of an embedded service."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="The address to listen on.")
    port: int = Field(default=8400, ge=0, le=65535, description="The port to listen on; 0 takes a free one.")
    allowed_hosts: str = Field(
        default="",
        description="The names that clients may call the service by, with commas; `*.example.org` for all below one, "
        "`*` for any. Addresses are always good. Default: `localhost` on loopback, any name elsewhere.",
    )
    socket: Path | None = Field(
        default=None,
        description="A Unix socket to listen on, for a reverse proxy on the same machine, in place of HOLDFAST_HOST "
        "and HOLDFAST_PORT. It is made with mode 0660: the service's user and group can call.",
    )
    trusted_proxies: str = Field(
        default="",
        description="Addresses or networks of the reverse proxies in front, with commas, and `unix` for who calls by "
        "HOLDFAST_SOCKET: their X-Forwarded-For and X-Forwarded-Proto say who calls, and by which scheme. Nobody else "
        "is believed. Default: none.",
    )
    public_url: str | None = Field(
        default=None,
        description="Where people reach the web page, such as `https://holdfast.example.org`. With https a session's "
        "cookie is for https alone, whatever the proxy in front says.",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="The service's certificate in PEM, followed by those of the authorities in between: `holdfast "
        "serve` then speaks https alone, TLS 1.2 or newer. A file that is renewed is taken for new connections within "
        "seconds. Default: plain http.",
    )
    tls_key: Path | None = Field(
        default=None,
        description="The private key of HOLDFAST_TLS_CERTIFICATE in PEM, without a passphrase. Default: it stands in "
        "the certificate's file.",
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="Certificates, in PEM, of the authorities whose certificates callers show (mutual TLS). A token is "
        "needed all the same.",
    )
    tls_clients: Literal["required", "optional"] = Field(
        default="required",
        description="With HOLDFAST_TLS_CLIENT_CA: `required` refuses every call without a certificate but `/healthz` "
        "and `/readyz`; `optional` verifies those that are shown.",
    )
    header_seconds: float = Field(
        default=20.0, gt=0, description="A connection that has not sent the head of a request by then is closed."
    )
    most_connections: int = Field(
        default=5000,
        ge=1,
        description="Connections at a time, of each process; fewer if the limit of open files is lower. One more takes "
        "the place of an idle one, of the address that has the most of them.",
    )
    requests_at_once: int = Field(
        default=8,
        ge=1,
        description="Calls that each process works on at once; projects take turns, and one project has all places but "
        "one at most, or an eighth of them in a crowded process while another project trains.",
    )
    project_requests: int = Field(
        default=2000,
        ge=4,
        description="Calls of one project that are under way in each process, those that wait for their turn included. "
        "At half of it begins get 429 and a time to retry at; at three quarters negotiations, at all of it every "
        "call but seals and heartbeats.",
    )
    project_requests_per_second: float = Field(
        default=0.0,
        ge=0,
        description="Calls a second of one project, in each process; 0: any number. A project that was quiet may make "
        "as many at once as HOLDFAST_TOKEN_BURST_SECONDS says; begins and lists leave half of these to other calls, "
        "and negotiations a quarter. Seals and heartbeats are not counted and not refused; of the others one more gets "
        "429. Nor is a call counted that names a checkpoint's id, by a token of every project, in a process that did "
        "not see it begin.",
    )
    most_requests: int = Field(
        default=4000,
        ge=4,
        description="The same for all projects together, with 503. A project within its fair share of them is not "
        "refused.",
    )
    token_requests_per_second: float = Field(
        default=0.0,
        ge=0,
        description="Calls a second of one token, in each process; 0: any number. All tokens that one identity got "
        "count as one. A token can be made with a limit of its own. Seals and heartbeats are not counted and not "
        "refused; of the others one more gets 429.",
    )
    token_burst_seconds: float = Field(
        default=10.0,
        gt=0,
        description="A token or a project that was quiet may make as many calls at once as in so long.",
    )
    token_requests: int = Field(
        default=4000,
        ge=4,
        description="Calls of one token, or of all that one identity got, that are under way in each process, refused "
        "in the order of HOLDFAST_PROJECT_REQUESTS. A token can be made with a limit of its own.",
    )
    project_long_polls: int = Field(
        default=2000,
        ge=1,
        description="Calls of one project that wait for a checkpoint's outcome, in each process. One more gets 429.",
    )
    project_streams: int = Field(
        default=2000,
        ge=1,
        description="Event streams of one project that are open, in each process. One more gets 429.",
    )
    project_tickets: int = Field(
        default=1_000_000,
        ge=1,
        description="Chunks of one project that are being sent, in all processes together, more or less. Beyond it "
        "negotiations get 429 until some have arrived.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="`json` or `console`; `auto` is JSON unless stderr is a terminal."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The lowest level that is logged."
    )
    bootstrap_token: SecretStr | None = Field(
        default=None,
        description="The first token (every scope, every project), kept as a hash at the start: "
        "`hold_` + 16 random hex digits + `_` + 64 random hex digits. For services that are not embedded.",
    )
    secrets_key_file: Path | None = Field(
        default=None,
        description="A file with the keys that encrypt what is secret in the catalog: 32 random bytes in base64 or hex "
        "on each line (`openssl rand -base64 32`). The first key encrypts, all open. Default: no key, and the secrets "
        "are plain.",
    )
    secrets_key: SecretStr | None = Field(
        default=None, description="The same keys, in the setting itself, in place of HOLDFAST_SECRETS_KEY_FILE."
    )
    secrets_key_command: str | None = Field(
        default=None,
        description="A command that prints the same keys, in place of HOLDFAST_SECRETS_KEY_FILE: it asks a KMS. It is "
        "run by each process at its start, without a shell, and has a minute.",
    )
    identity_file: Path | None = Field(
        default=None,
        description="The reviewed file that says which issuers of identities are believed (OpenID Connect), and which "
        "of their claims or groups give which role: docs/operating/identity.md. It is read again when it changes. "
        "Default: nobody but who has a token of this service.",
    )
    identity_exchanges_per_second: float = Field(
        default=10.0,
        ge=0,
        description="Tokens that one identity of a job gets by exchanges, in each process, a second; 0: any number. "
        "All whom one rule lets in get ten times as many together. Who was quiet gets as many at once as in 5 minutes, "
        "for the ranks of a large job. One more gets 429 and a time to retry at.",
    )
    session_hours: float = Field(
        default=12.0, gt=0, le=24 * 30, description="Who has signed in to the web page signs in again after so long."
    )
    ticket_seconds: int = Field(
        default=900, ge=2, le=7 * 86400, description="How long a ticket to upload or to read can be used."
    )
    longest_upload_seconds: int = Field(
        default=3600,
        ge=1,
        description="No upload that has begun takes longer; an unreferenced chunk is kept so long after its ticket.",
    )
    upload_idle_seconds: int = Field(
        default=1800, ge=5, description="A checkpoint that no rank has touched for so long is aborted."
    )
    lost_after_seconds: float = Field(
        default=300.0,
        ge=0.5,
        description="How fast silence is noticed: a job that was not heard of for so long is shown as lost. Jobs are "
        "asked for a heartbeat in each tenth of it.",
    )
    crash_loop_attempts: int = Field(
        default=3,
        ge=0,
        description="A checkpoint from which so many attempts resumed and crashed without progress is quarantined; "
        "0: none is.",
    )
    stall_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="A run whose job is alive and ends no step for so long is shown as stalled; for 20 of its usual "
        "steps, if that is longer.",
    )
    save_interval_seconds: float = Field(
        default=600.0,
        gt=0,
        description="The recommended time between two saves until a run's own saves are measured; then it is what "
        "loses the least (`holdfast runs advise`).",
    )
    shortest_save_interval_seconds: float = Field(
        default=60.0, gt=0, description="No shorter time between two saves is recommended, however cheap saves are."
    )
    longest_save_interval_seconds: float = Field(
        default=4 * 3600.0,
        gt=0,
        description="No longer time between two saves is recommended, however seldom anything fails: what one failure "
        "may take.",
    )
    read_lease_seconds: int = Field(
        default=3600, ge=1, description="Nothing that is being read is purged for so long after the last ticket."
    )
    controller_interval_seconds: float = Field(
        default=5.0, gt=0, description="The pause between two passes of background work."
    )
    serve_controllers: bool = Field(
        default=True,
        description="`holdfast serve` does background work too; `false` leaves it to `holdfast workers run` "
        "(on Postgres).",
    )
    serve_workers: int = Field(
        default=1,
        ge=1,
        description="How many processes of `holdfast serve` answer requests. More than one needs Postgres, and one "
        "more process then does the background work.",
    )
    lease_seconds: int = Field(
        default=120,
        ge=3,
        le=6 * 3600,
        description="So long after a killed process's last sign another one goes on with its pass or operation.",
    )
    retention_interval_seconds: float = Field(
        default=300.0, gt=0, description="How often retention policies are applied by themselves."
    )
    trash_policy_seconds: float = Field(
        default=3600.0, ge=0, description="What a policy expired can be taken back from the trash for so long."
    )
    trash_person_seconds: float = Field(default=72 * 3600.0, ge=0, description="The same for what a person deleted.")
    keep_operations_days: float = Field(
        default=90.0, gt=0, description="Operations that ended go so long afterwards; the last one of its kind stays."
    )
    keep_tokens_days: float = Field(
        default=90.0, gt=0, description="Tokens go so long after they expired or were revoked."
    )
    keep_webhook_calls_days: float = Field(
        default=30.0, gt=0, description="Calls of webhooks go so long after they were made, if they are over."
    )
    keep_events_days: float = Field(
        default=30.0, gt=0, description="Events can be listed, and followed from then on, for so long."
    )
    keep_samples_days: float = Field(
        default=400.0, gt=0, description="The hourly samples of projects and runs go after so long."
    )
    keep_checkpoint_rows_days: float = Field(
        default=90.0,
        gt=0,
        description="What the catalog says of aborted and deleted checkpoints goes so long after their bytes could go.",
    )
    trash_disk_percent: float = Field(
        default=90.0,
        ge=0,
        le=100,
        description="What a policy expired is purged at once while the disk of a posix store is fuller than this.",
    )
    trash_quota_percent: float = Field(
        default=90.0,
        ge=0,
        le=100,
        description="The same while a project uses more than this share of its quota of bytes, objects or rows.",
    )
    collect_full_scan_seconds: float = Field(
        default=6 * 3600,
        gt=0,
        description="How often the collector looks at every copy; in between it looks at what lost a reference.",
    )
    sweep_interval_seconds: float = Field(
        default=86400.0,
        gt=0,
        description="How often each store is listed and compared with the catalog, for objects that no row knows.",
    )
    sweep_most_percent: float = Field(
        default=5.0,
        ge=0,
        le=100,
        description="A sweep that would delete more than this share of a store or of a project deletes nothing and "
        "says so; up to 20 objects and 1 GiB go in any case.",
    )
    chunk_lease_seconds: int = Field(
        default=600,
        ge=2,
        le=6 * 3600,
        description="A process that was killed while it read or copied a chunk holds that chunk so long. Reading the "
        "largest one takes less.",
    )
    prove_bytes_per_second: int = Field(
        default=100 * 1024 * 1024,
        ge=1,
        description="How fast a process reads copies back, proving, scrubbing, repairing and comparing together.",
    )
    scrub_days: float = Field(
        default=30.0,
        ge=0,
        le=3650,
        description="Every copy that can be read is read and hashed again once in so many days; 0 switches it off.",
    )
    scrub_bytes_per_second: int = Field(
        default=50 * 1024 * 1024,
        ge=1,
        description="How fast scheduled scrubbing reads, at most, within HOLDFAST_PROVE_BYTES_PER_SECOND.",
    )
    comparison_memory_bytes: int = Field(
        default=256 * 1024**2,
        ge=1024**2,
        description="How much memory a comparison of values takes for the tensors, at most. Two may run for a project.",
    )
    copy_bytes_per_second: int = Field(
        default=100 * 1024 * 1024,
        ge=1,
        description="How fast a process copies to the second store, at most.",
    )
    store_unavailable_seconds: float = Field(
        default=30.0,
        ge=0,
        description="After so long without an answer from the first store, an older checkpoint that is whole in the "
        "second one is restored rather than waited for. Chunks that both have are read from the second at once.",
    )
    webhook_allowed_hosts: str = Field(
        default="",
        description="Hosts of your own network that webhooks may call, with commas: `host` or `host:port`. All others "
        "must have public addresses and https.",
    )
    shutdown_seconds: int = Field(default=20, ge=0, description="How long requests in flight may go on after SIGTERM.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            setting = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
            reason = first["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{setting} is not usable: {reason}. Correct it or leave it out.") from None

    @field_validator("database_url")
    @classmethod
    def _a_known_database(cls, url: SecretStr | None) -> SecretStr | None:
        if url is None:
            return None
        try:
            backend = make_url(url.get_secret_value()).get_backend_name()
        except ArgumentError:
            raise ValueError("it must look like sqlite:///path or postgresql://user@host/name") from None
        if backend not in ("sqlite", "postgresql", "postgres"):
            raise ValueError(f"{backend} is not supported; it must be sqlite:///path or postgresql://user@host/name")
        return url

    @field_validator("public_url")
    @classmethod
    def _an_origin(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not re.fullmatch(r"https?://[^/?#@\s]+/?", url):
            raise ValueError("it must be a scheme and a host, such as https://holdfast.example.org")
        scheme, _, host = url.rstrip("/").lower().partition("://")
        return f"{scheme}://{host.removesuffix(':443' if scheme == 'https' else ':80')}"  # as a browser writes it

    @field_validator(
        "data_dir", "socket", "tls_certificate", "tls_key", "tls_client_ca", "secrets_key_file", "identity_file"
    )
    @classmethod
    def _an_absolute_path(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @property
    def database_url_text(self) -> str:
        """With the password in it: for the engine only."""
        if self.database_url is None:
            return f"sqlite:///{self.data_dir / 'catalog.db'}"
        return self.database_url.get_secret_value()

    @property
    def store_url(self) -> str:
        return self.store or f"posix://{self.data_dir / 'store'}"

    @property
    def store_urls(self) -> dict[StoreRole, str]:
        """By role, the primary store first; only those that are set."""
        urls = {StoreRole.PRIMARY: self.store_url, StoreRole.SECOND: self.second_store, StoreRole.COLD: self.cold_store}
        return {role: url for role, url in urls.items() if url is not None}

    def store_credentials(self, role: StoreRole) -> Credentials | None:
        """The keys that the settings themselves give for a store. Raises SettingsError for half of a pair."""
        key, secret = self.second_store_access_key_id, self.second_store_secret_access_key
        if role is not StoreRole.SECOND or (key is None and secret is None):
            return None
        if key is None or secret is None:
            raise SettingsError(
                "HOLDFAST_SECOND_STORE_ACCESS_KEY_ID and HOLDFAST_SECOND_STORE_SECRET_ACCESS_KEY belong together. Give "
                "both, or neither."
            )
        return Credentials(key, secret.get_secret_value())

    @property
    def store_gid(self) -> int | None:
        """The number of `store_group`. Raises SettingsError for a group that this machine does not know."""
        if self.store_group is None or self.store_group.isdecimal():
            return None if self.store_group is None else int(self.store_group)
        try:
            return grp.getgrnam(self.store_group).gr_gid
        except KeyError:
            raise SettingsError(
                f"HOLDFAST_STORE_GROUP: this machine has no group {self.store_group!r}. Give its number, or make it."
            ) from None

    @property
    def webhook_hosts(self) -> frozenset[str]:
        return frozenset(host for part in self.webhook_allowed_hosts.lower().split(",") if (host := part.strip()))

    @property
    def host_names(self) -> frozenset[str]:
        """Lower-case, with `*` for any."""
        names = self.allowed_hosts.lower() or ("localhost,*.localhost" if self.on_loopback else "*")
        return frozenset(name for part in names.split(",") if (name := part.strip()))

    @property
    def token_file(self) -> Path:
        return self.data_dir / "token"

    @property
    def on_loopback(self) -> bool:
        """What listens on a Unix socket stands behind a proxy, which has callers from everywhere."""
        if self.socket is not None:
            return False
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def embedded(self) -> bool:
        """One process for the people of one machine: it makes the first token by itself and leaves it in a file."""
        return self.on_loopback and make_url(self.database_url_text).get_backend_name() == "sqlite"


def refuse_unknown_settings(environment: Mapping[str, str] = os.environ) -> None:
    """A misspelt setting would silently not do what it says. Raises SettingsError that names it."""
    known = {name.upper() for name in ServiceSettings.model_fields} | OTHERS_SETTINGS
    for variable in sorted(environment):
        name = variable.upper().removeprefix(PREFIX)
        if not variable.upper().startswith(PREFIX) or name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"Did you mean {PREFIX}{close[0]}?" if close else "`holdfast serve --print-settings` lists them."
        raise SettingsError(f"There is no setting {variable}. {meant}")


def settings_table() -> list[tuple[str, str, str]]:
    """(setting, default, description) in the order of the class: for the command line and for the documentation."""
    rows = []
    for name, field in ServiceSettings.model_fields.items():
        default = "" if field.default is None else str(field.default)
        rows.append((PREFIX + name.upper(), default, field.description or ""))
    return rows
