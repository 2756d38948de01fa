"""A real OpenID provider for the tests: oidc-provider from npm. A test chooses accounts, keys and lifetimes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin

import httpx

from tests.support.ports import free_ports
from tests.support.prepare import prepare
from tests.support.processes import ServerProcess

PUBLIC_CLIENT = "holdfast"
"""Without a secret; any port of loopback may be its redirect_uri (RFC 8252), with the path `CALLBACK`."""
CONFIDENTIAL_CLIENT = "holdfast-confidential"
CLIENT_SECRET = "a-client-secret-of-the-tests-32-characters-or-more"
OTHER_CLIENT = "another-application"
"""Its ID tokens have an audience that is not Holdfast's."""
SERVICE_CLIENT = "a-robot"
"""For client_credentials, with CLIENT_SECRET."""
CALLBACK = "/ui/sign-in"
RESOURCE = "https://resource.example"
"""The audience of the JWT that client_credentials gives if the call names no `resource`."""
SCOPE = "openid email profile groups"

_DEVICE = "urn:ietf:params:oauth:grant-type:device_code"
_PROGRAM = Path(__file__).with_suffix(".mjs")
_MOST_PAGES = 12


@dataclass(frozen=True)
class Options:
    """`certificate`: a PEM file with certificate and key (tests/support/tls.py `self_signed`); with it the issuer is
    https."""

    id_token_seconds: int = 3600
    code_seconds: int = 60
    device_code_seconds: int = 600
    certificate: Path | None = None
    callback: str = CALLBACK


class OidcProvider:
    """One provider. Its memory (accounts, sessions, codes, keys) ends with `stop`; `start` takes the same issuer."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder = folder
        self._options = options
        self._home = _home()
        self.issuer = f"http{'s' if options.certificate else ''}://127.0.0.1:{free_ports()}"
        self._process = self._launch()

    def stop(self) -> None:
        self._process.stop(grace_seconds=5)

    def start(self) -> None:
        """The same issuer and clients, no accounts, and other keys."""
        self._process = self._launch()

    def discovery(self) -> dict[str, Any]:
        with self.http() as http:
            return dict(http.get("/.well-known/openid-configuration").raise_for_status().json())

    def http(self) -> httpx.Client:
        """Keeps cookies, so it is one person's browser."""
        trusted = str(self._options.certificate) if self._options.certificate else True
        return httpx.Client(base_url=self.issuer, verify=trusted, timeout=60)

    def account(self, subject: str, *groups: str, **claims: Any) -> None:
        """What the ID tokens of this person say from now on. Without it, a person has a subject and nothing else."""
        told = {"email": f"{subject}@example.com", "email_verified": True, "name": subject.title(), **claims}
        self._administer("accounts", sub=subject, claims={**told, "groups": list(groups)})

    def rotate(self, *, keep: bool = True) -> str:
        """Signs with a new key from now on, whose `kid` it returns. `keep`: the old one is published yet."""
        return str(self._administer("rotate", keep=keep)["kid"])

    def slow_down(self, count: int) -> None:
        """The next so many questions for a device code's tokens are answered `slow_down`."""
        self._administer("slow-downs", count=count)

    def token(
        self,
        subject: str,
        *,
        audience: str | list[str] = PUBLIC_CLIENT,
        seconds: int = 600,
        by: Literal["current", "retired", "stranger"] = "current",
        header: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """A JWT signed by this issuer's key, as the issuers of Kubernetes, GitHub and GitLab make them. `claims` may
        replace iss, iat, exp, nbf …; None leaves one out. `by`: a `stranger` signs with a key of its own and names the
        issuer's; `retired` is the key before the last rotation."""
        now = int(time.time())
        made = {"iss": self.issuer, "sub": subject, "aud": audience, "iat": now, "exp": now + seconds, **claims}
        said = {name: value for name, value in made.items() if value is not None}
        return str(self._administer("tokens", claims=said, header=header or {}, by=by)["token"])

    def client_credentials(self, *, resource: str = RESOURCE) -> str:
        """A JWT access token of SERVICE_CLIENT, by the protocol."""
        with self.http() as http:
            reply = http.post(
                "/token",
                data={"grant_type": "client_credentials", "resource": resource},
                auth=(SERVICE_CLIENT, CLIENT_SECRET),
            )
            return str(reply.raise_for_status().json()["access_token"])

    def visit(self, http: httpx.Client, url: str, *, subject: str = "", cancel: bool = False) -> str:
        """A person goes through the provider's pages from `url` on: signs in as `subject` (a browser that is signed in
        is not asked again), and consents. `cancel`: the person declines instead. Returns the address outside of the
        provider that the last page leads to, or the text of the last page."""
        page = http.get(url)
        for _ in range(_MOST_PAGES):
            if page.has_redirect_location:
                target = urljoin(str(page.url), page.headers["location"])
                if not target.startswith(f"{self.issuer}/"):
                    return target
                page = http.get(target)
                continue
            page.raise_for_status()
            if cancel and (away := re.search(r'href="([^"]+/abort)"', page.text)):
                page = http.get(away[1])
                continue
            form = _Form(page.text)
            if form.action is None:
                return page.text
            filled = form.fields | ({"login": subject, "password": "any"} if "login" in form.fields else {})
            if cancel and "confirm" in filled:
                filled |= {"abort": "yes"}
            page = http.post(urljoin(str(page.url), form.action), data=filled)
            if cancel and "abort" in filled:
                return page.text
        raise AssertionError(f"the provider has no end of pages: {page.url}")

    def id_token(self, subject: str, *, client: str = PUBLIC_CLIENT, scope: str = SCOPE) -> str:
        """By the device flow of the protocol, in a fresh browser."""
        with self.http() as http:
            begun = http.post("/device/auth", data={"client_id": client, "scope": scope}).raise_for_status().json()
            self.visit(http, begun["verification_uri_complete"], subject=subject)
            asked = {"grant_type": _DEVICE, "device_code": begun["device_code"], "client_id": client}
            return str(http.post("/token", data=asked).raise_for_status().json()["id_token"])

    def _administer(self, what: str, **body: Any) -> dict[str, Any]:
        with self.http() as http:
            return dict(http.post(f"/test/{what}", json=body).raise_for_status().json())

    def _launch(self) -> ServerProcess:
        options = {**asdict(self._options), "issuer": self.issuer, "clients": self._clients()}
        command = ["node", str(_PROGRAM), str(self._home), json.dumps(options, default=str)]
        return ServerProcess(command, log=self._folder / "oidc-provider.log", ready=self._answers, cwd=self._folder)

    def _clients(self) -> list[dict[str, Any]]:
        person = {
            "application_type": "native",
            "grant_types": ["authorization_code", _DEVICE],
            "response_types": ["code"],
            "redirect_uris": [f"http://127.0.0.1{self._options.callback}", f"http://localhost{self._options.callback}"],
        }
        public = {**person, "token_endpoint_auth_method": "none"}
        secret = {"client_secret": CLIENT_SECRET, "token_endpoint_auth_method": "client_secret_basic"}
        robot = {"grant_types": ["client_credentials"], "response_types": [], "redirect_uris": []}
        return [
            {"client_id": PUBLIC_CLIENT, "client_name": "Holdfast", **public},
            {"client_id": OTHER_CLIENT, **public},
            {"client_id": CONFIDENTIAL_CLIENT, **person, **secret},
            {"client_id": SERVICE_CLIENT, **robot, **secret},
        ]

    def _answers(self) -> bool:
        try:
            return bool(self.discovery())
        except httpx.HTTPError:
            return False


class _Form(HTMLParser):
    """The first form of a page: `action` is None if it has none."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if tag == "form" and self.action is None:
            self.action = said.get("action")
        elif tag == "input" and (name := said.get("name")):
            self.fields[name] = said.get("value") or ""


@contextmanager
def oidc_provider(options: Options | None = None) -> Iterator[OidcProvider]:
    """Gone afterwards. NotHereError where it cannot run."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-oidc-"))
    try:
        provider = OidcProvider(folder, options or Options())
        try:
            yield provider
        finally:
            provider.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _home() -> Path:
    """Where it is installed; it is installed if need be."""
    prepare("oidc-provider", "oidc-provider", sys.prefix)
    return Path(sys.prefix) / "oidc-provider"
