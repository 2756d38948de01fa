"""The service itself: server, controllers, long operations, audit events, tokens.

`GET /v1/service` -> ServerInfo   (any valid token)
`GET /healthz`   -> alive; `GET /readyz` -> Readiness   (no token)
`GET /metrics`   -> Prometheus text   (scope `metrics`)

Background work, and its processes. A token of one project may not call these, because controllers work for every one:
`GET  /v1/controllers`                             -> Page[ControllerView]
`GET  /v1/controllers/{name}`                      -> ControllerView
`POST /v1/controllers/{name}/pause`  PauseController -> ControllerView
`POST /v1/controllers/{name}/resume`               -> ControllerView
`POST /v1/controllers/{name}/run`                  -> ControllerView
`GET  /v1/workers`                                 -> Page[WorkerView]

Long operations that a person started: a worker carries each out and reports its progress. The call that starts one
belongs to its kind and answers with an OperationView; repeated meanwhile, it answers with the existing one:
`GET  /v1/operations`               ?project=&run=&kind=&state= -> Page[OperationView], the newest first
`GET  /v1/operations/{id}`                                      -> OperationView
`POST /v1/operations/{id}/cancel`                               -> OperationView

Audit events, append-only; and tokens, `hold_<id>_<secret>`, kept as a SHA-256, with scopes, a project and an end:
`GET    /v1/audit-events` filters -> Page[AuditEventView] (the newest first)
`POST   /v1/tokens`        CreateToken -> TokenCreated
`GET    /v1/tokens`                    -> Page[TokenView]
`DELETE /v1/tokens/{id}`               -> TokenView

Who has no token of this service brings one of another issuer (RFC 8693, in JSON): a job that of its platform, a person
an ID token. The service's identity file says which issuers, and what they get:
`POST   /v1/tokens/exchange` ExchangeToken -> ExchangedToken   (no token)

Sessions of the web page. A token, or a code that a token has made, opens one; its cookie then takes the token's place
in every call. A call by cookie that is no GET or HEAD brings `csrf_token` in the header `X-Holdfast-CSRF`:
`POST   /v1/sessions`                  -> SessionView, and the cookie (by token or code)
`GET    /v1/sessions/current`          -> SessionView (by cookie)
`DELETE /v1/sessions/current`          -> nothing: it has ended (by cookie)
`GET    /v1/sessions`                  -> Page[OpenSession]
`DELETE /v1/sessions/{id}`             -> OpenSession: it has ended
`POST   /v1/sign-in-codes`             -> SignInCode (by token)

Signing in as a person, at a provider of OpenID Connect that the service believes. No call of these has a token. The
page goes to `url`, where the person signs in; the provider sends the browser back to CALLBACK_PATH, and the page takes
`code` and `state` from there into the third call. A command has no browser of its own: it asks the provider itself for
a device code (RFC 8628), and exchanges the ID token:
`GET  /v1/sign-ins/providers`              -> SignInProviders
`POST /v1/sign-ins`          BeginSignIn   -> SignInBegun, and a cookie for this browser
`POST /v1/sign-ins/finish`   FinishSignIn  -> SessionView, and the session's cookie
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, SecretStr

from holdfast_protocol.base import Name, Reply, Request, example, since
from holdfast_protocol.states import OperationState, Role, Scope


class ServerInfo(Reply):
    version: str
    protocol: str
    catalog_id: str
    epoch: int
    now: datetime
    store_kind: str
    codecs: list[str] = Field(
        default=["raw"], description="How chunks may be offered. A service that does not say takes them raw."
    )
    store_asks_md5: bool = Field(description="The store enforces MD5, not SHA-256: offer it with each chunk.")
    token_name: str
    token_project: str | None
    token_scopes: list[Scope]
    token_id: str | None = Field(default=None, description="null: the service is older, and does not tell it.")
    token_expires_at: datetime | None = Field(default=None, description="null: never.")
    token_ends_soon: bool = Field(
        default=False, description="A tenth of its life is left, or less, and never more than a week."
    )


class ReadinessCheck(Reply):
    name: Literal["database", "migrations", "store"]
    ok: bool
    detail: str


class Readiness(Reply):
    ready: bool
    checks: list[ReadinessCheck]
    warnings: list[str] = Field(
        default_factory=list,
        description="Defects to fix although the service works: processes whose stores differ, and weak stores.",
    )
    weaknesses: list[str] = Field(
        default_factory=list, description="The warnings about checks that a store should enforce and does not."
    )


class PauseController(Request):
    model_config = example({"reason": "the store is being moved"})

    reason: str = Field(min_length=1, max_length=500, description="Shown to people who find it paused.")


class ControllerView(Reply):
    """One controller, over all processes."""

    name: str
    interval_seconds: float = Field(description="The pause between two passes.")
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    run_requested_at: datetime | None = Field(description="When a pass was requested that is not over yet.")
    run_answered_at: datetime | None = Field(description="The newest request that a pass has answered.")
    due: int | None = Field(description="Waiting rows. null: its work is not in rows.")
    leased: int | None = Field(description="Rows that a process works on.")
    lag_seconds: float | None = Field(description="How long the oldest row waits; 0 if none does.")
    done: int = Field(description="Rows that it has settled, since the catalog was made.")
    failed: int = Field(description="How often a row or a pass failed; it stays due.")
    error: str | None = Field(description="The last failure; later successful passes keep it.")
    error_at: datetime | None
    last_pass_at: datetime | None = Field(
        description="The end of the last pass in any process; passes without work are recorded now and then."
    )
    report: dict[str, Any] | None = Field(description="The report of the last pass that found work.")
    report_at: datetime | None
    pass_seconds: float | None = Field(description="How long that pass took.")


class WorkerView(Reply):
    """A process of the service that has not ended in order."""

    id: str
    kind: Literal["serve", "worker"]
    host: str
    pid: int
    version: str
    started_at: datetime
    seen_at: datetime
    silent: bool = Field(description="It was killed, cut off, or hangs: its leases run out.")
    stores: dict[str, int] = Field(
        default_factory=dict, description="The stores that it has attached, by role: their numbers in the catalog."
    )
    done: dict[str, int] = Field(description="Rows that it has settled, by controller.")


class OperationProgress(Reply):
    """How far it is, by its worker's last report."""

    done: int | None = None
    total: int | None = Field(default=None, description="null: not known yet.")
    note: str | None = Field(default=None, description="Its current activity, for people.")


class OperationView(Reply):
    id: str = Field(examples=["op_5f0c7d9f1f4b"])
    kind: str = Field(examples=["drill"])
    project: str | None = Field(description="null: it concerns the whole service.")
    run: str | None
    checkpoint_id: str | None
    arguments: dict[str, Any]
    state: OperationState
    progress: OperationProgress
    result: dict[str, Any] | None = Field(description="The result, by kind; null until it is done.")
    error: str | None = Field(description="Why it failed, was cancelled, or is tried again.")
    created_at: datetime
    created_by: str = Field(description="The name of the token.")
    started_at: datetime | None
    ended_at: datetime | None
    cancel_requested_at: datetime | None
    tries: int = Field(
        description="How often a worker began it: again when one was killed, or the store was unavailable."
    )


ActorKind = Literal["person", "controller"]


class AuditEventView(Reply):
    id: int = Field(description="A larger id was begun later, but may be written earlier.")
    at: datetime = Field(description="By the database's clock.")
    actor_kind: ActorKind
    actor: str = Field(description="The name of a person's token, or of a controller.")
    token_id: str | None
    action: str = Field(description="noun.verb", examples=["checkpoint.trash"])
    project: str | None
    run: str | None
    checkpoint_id: str | None
    step: int | None
    reason: str | None
    before: dict[str, Any] | None = Field(description="The changed fields before.")
    after: dict[str, Any] | None = Field(description="The changed fields after.")


TokenRate = Annotated[float, Field(ge=0.001, le=100_000)]
"""Calls a second."""
TokenCalls = Annotated[int, Field(ge=4, le=100_000)]
"""Calls that are under way at once."""


class CreateToken(Request):
    model_config = example({"name": "demo trainers", "project": "demo", "scopes": ["train", "read"]})

    name: str = Field(min_length=1, max_length=100)
    project: Name | None = Field(default=None, description="null: every project.")
    scopes: list[Scope] = Field(min_length=1)
    expires_in_seconds: int | None = Field(default=90 * 86400, ge=60)
    requests_per_second: TokenRate | None = Field(
        default=None,
        json_schema_extra=since(9),
        description="Its calls a second, in each process, seals and heartbeats left out. null: what the settings say, "
        "or the limit of the token that makes it.",
    )
    concurrent_requests: TokenCalls | None = Field(
        default=None,
        json_schema_extra=since(9),
        description="Its calls that may be under way in each process, likewise.",
    )


class TokenView(Reply):
    id: str
    name: str
    project: str | None
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(
        default=None, description="Some minutes late. null: not yet, or before the service kept it."
    )
    requests_per_second: float | None = Field(default=None, description="null: what the service's settings say.")
    concurrent_requests: int | None = Field(default=None, description="null: what the service's settings say.")
    issuer: str | None = Field(
        default=None, description="Of the identity that it was made for. null: another token made it, or a command."
    )
    subject: str | None = Field(default=None, description="Of that identity: its name at the issuer.")


class TokenCreated(TokenView):
    token: str = Field(description="Shown once. The service keeps only its SHA-256.")


TOKEN_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"  # noqa: S105
JWT_TYPE: Final = "urn:ietf:params:oauth:token-type:jwt"
ID_TOKEN_TYPE: Final = "urn:ietf:params:oauth:token-type:id_token"  # noqa: S105
ACCESS_TOKEN_TYPE: Final = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105


class ExchangeToken(Request):
    """The names are those of RFC 8693."""

    model_config = example(
        {
            "subject_token": "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJodHRwczovL2lkIn0.c2lnbmF0dXJl",
            "project": "demo",
            "role": "trainer",
        }
    )
    largest_body_bytes: ClassVar[int] = 32 * 1024

    grant_type: Literal["urn:ietf:params:oauth:grant-type:token-exchange"] = TOKEN_EXCHANGE
    subject_token: str = Field(
        min_length=1,
        max_length=16 * 1024,
        pattern=r"^[A-Za-z0-9._-]+$",
        repr=False,
        description="A JWT: of a Kubernetes service account, of GitHub, GitLab or a cloud, or a person's ID token.",
    )
    subject_token_type: Literal["urn:ietf:params:oauth:token-type:jwt", "urn:ietf:params:oauth:token-type:id_token"] = (
        JWT_TYPE
    )
    project: Name | None = Field(
        default=None, description="null: every project if a rule gives that, else the only one that rules give."
    )
    role: Role | None = Field(default=None, description="null: all that the rules give.")
    expires_in_seconds: int | None = Field(
        default=None, ge=60, le=30 * 86400, description="null: as long as the rule allows, which is the most."
    )


class ExchangedToken(TokenView):
    """The fields of RFC 8693, beside those of every token."""

    roles: list[Role] = Field(description="What the rules gave it.")
    access_token: str = Field(repr=False, description="Shown once. The service keeps only its SHA-256.")
    issued_token_type: str = ACCESS_TOKEN_TYPE
    token_type: str = "Bearer"  # noqa: S105
    expires_in: int = Field(description="Seconds.")
    scope: str = Field(description="The scopes, with blanks between them.")


LONGEST_OVERLAP_SECONDS = 90 * 86400


class RotateToken(Request):
    model_config = example({"overlap_seconds": 86400})

    overlap_seconds: int = Field(
        default=86400,
        ge=60,
        le=LONGEST_OVERLAP_SECONDS,
        description="So long the token that is replaced stays good, unless it ends before.",
    )
    expires_in_seconds: int | None = Field(default=90 * 86400, ge=60, description="Of the new token. null: never.")


class TokenRotated(TokenCreated):
    """The new token, and the one that it replaces."""

    replaced: TokenView = Field(description="With its end.")


CSRF_HEADER = "X-Holdfast-CSRF"
SESSION_COOKIE = "holdfast_session"
"""Over https `__Host-holdfast_session`: a browser takes that one from this host alone."""
SIGN_IN_CODE_SECONDS = 60


class SessionView(Reply):
    """A session may do what its token may, and ends with it."""

    id: str
    token_id: str
    name: str = Field(description="The token's.")
    project: str | None = Field(description="null: every project.")
    scopes: list[Scope]
    csrf_token: str = Field(description=f"For the header {CSRF_HEADER} of each call that is no GET or HEAD.")
    created_at: datetime
    expires_at: datetime


class OpenSession(Reply):
    """A session that can call now. Whose browser it is, only the person knows to whom the token was given."""

    id: str
    token_id: str
    name: str = Field(description="The token's.")
    project: str | None = Field(description="null: every project.")
    created_at: datetime
    expires_at: datetime
    current: bool = Field(description="This call came with its cookie.")


class SignInCode(Reply):
    """Opens one session of the token that has made it, in place of that token."""

    code: str = Field(description="Shown once. The service keeps only its SHA-256.")
    expires_at: datetime


CALLBACK_PATH = "/ui/sign-in"
"""Where a provider sends a browser back to: a place of the page. To be registered at the provider."""
SIGN_IN_COOKIE = "holdfast_sign_in"
"""Over https `__Host-holdfast_sign_in`. It says nothing of the person, and ends with the sign-in."""
SIGN_IN_SECONDS = 600
"""So long a person may take at the provider."""


class SignInProvider(Reply):
    name: str
    title: str = Field(description="For people: what the button says.")
    issuer: str
    device_client_id: str | None = Field(
        description="The client of commands at this provider: `holdfast login` signs in by it. null: it cannot."
    )
    scopes: list[str] = Field(description="What a sign-in asks the provider for.")


class SignInProviders(Reply):
    items: list[SignInProvider] = Field(description="Where people can sign in. Empty: with a token alone.")


class BeginSignIn(Request):
    model_config = example({"provider": "corp", "project": "demo"})

    provider: Name
    project: Name | None = Field(
        default=None, description="For who may call for several projects: the one that the session is for."
    )


class SignInBegun(Reply):
    url: str = Field(description="Where the browser goes now: the provider's own page.")


class FinishSignIn(Request):
    """What the provider gave the browser: a code, or why there is none."""

    model_config = example({"state": "q3Yk0S1mNfQv", "code": "SplxlOBeZQQYbYS6WxSbIA"})

    state: str = Field(max_length=200)
    code: SecretStr | None = Field(default=None, max_length=4000)
    error: str | None = Field(default=None, max_length=200)
    error_description: str | None = Field(default=None, max_length=1000)
    issuer: str | None = Field(default=None, max_length=1000, description="`iss`, where the provider gave one.")
