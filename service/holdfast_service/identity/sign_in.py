"""A person signs in to the page at a provider: OpenID Connect's authorization code with PKCE (rule
sign-in-ends-where-it-began).

    begin -> the provider's page -> the page's CALLBACK_PATH, with a code -> finish -> a session

Between the two calls the service keeps nothing. A cookie of this browser has one random secret, signed, with the
provider and an end; `state`, `nonce` and the PKCE verifier are derived from it. So a code and a state that come to
another browser are good for nothing there, and a code that was stolen on its way cannot be redeemed without the cookie.
The session is one of a token that `exchange.py` makes, for the same rules and as long as they allow; nobody ever sees
that token's text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request, Response

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import (
    CALLBACK_PATH,
    SIGN_IN_COOKIE,
    SIGN_IN_SECONDS,
    BeginSignIn,
    FinishSignIn,
    SessionView,
    SignInBegun,
    SignInProvider,
    SignInProviders,
)
from holdfast_service.auth.credentials import (
    cookie_name,
    is_secure,
    page_origin,
    refuse_other_pages,
    refuse_unless_cookie_fits,
)
from holdfast_service.auth.principal import authenticate
from holdfast_service.auth.sessions import open_for_identity
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.identity.exchange import identities_in, make_token
from holdfast_service.identity.identities import VerifiedIdentity
from holdfast_service.identity.keys import CALL_SECONDS, ProviderError, call_provider, json_object_of, url_in
from holdfast_service.identity.rules import ProviderRules

_SECRET_BYTES = 32
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class _Begun:
    """What the cookie says. `project`: the one that the session is for, if the person chose one."""

    secret: bytes
    provider: str
    project: str | None
    ends_at: int

    @property
    def state(self) -> str:
        return self._derived("state")

    @property
    def nonce(self) -> str:
        return self._derived("nonce")

    @property
    def verifier(self) -> str:
        return self._derived("verifier")

    def _derived(self, what: str) -> str:
        """43 characters, of which nobody gets to the secret or to another of them."""
        return _base64(hmac.new(self.secret, what.encode(), hashlib.sha256).digest())


def list_providers(context: ServiceContext) -> SignInProviders:
    """Those where people can sign in; none if the service takes no identities."""
    rules = None if context.identities is None else context.identities.rules
    return SignInProviders(
        items=[
            SignInProvider(
                name=provider.name,
                title=provider.shown,
                issuer=provider.issuer,
                device_client_id=provider.device_client_id
                or (provider.client_id if provider.client_secret_file is None else None),
                scopes=provider.scopes,
            )
            for provider in (() if rules is None else rules.providers)
            if provider.client_id is not None
        ]
    )


def needs(context: ServiceContext, name: str) -> Future[None] | None:
    """The call of the provider to wait for before `begin`. Raises `sign_in_failed` and `identity_not_configured`."""
    return identities_in(context).keys_of(_provider(context, name)).needs()


def begin(context: ServiceContext, body: BeginSignIn, request: Request, response: Response) -> SignInBegun:
    """Where the browser goes, and a cookie for it. Raises `sign_in_failed`, `identity_not_configured`,
    `identity_provider_unavailable`, `csrf_failed` and `forbidden`."""
    refuse_other_pages(request)
    refuse_unless_cookie_fits(request)
    here = page_origin(request)
    if request.headers.get("origin", here).lower() != here:
        raise _failed(f"A sign-in comes back to {here}, and this page is from elsewhere. Open {here}/ui/.")
    provider = _provider(context, body.provider)
    begun = _Begun(secrets.token_bytes(_SECRET_BYTES), provider.name, body.project, int(time.time()) + SIGN_IN_SECONDS)
    document = identities_in(context).keys_of(provider).document()
    try:
        endpoint = url_in(document, "authorization_endpoint")
    except ProviderError as error:
        raise _unavailable(provider, error) from None
    asked = {
        "response_type": "code",
        "client_id": provider.client_id,
        "redirect_uri": _redirect_uri(request),
        "scope": " ".join(provider.scopes),
        "state": begun.state,
        "nonce": begun.nonce,
        "code_challenge": _base64(hashlib.sha256(begun.verifier.encode()).digest()),
        "code_challenge_method": "S256",
    }
    set_sign_in_cookie(request, response, _signed(context, begun), SIGN_IN_SECONDS)
    return SignInBegun(url=f"{endpoint}?{urlencode(asked)}")


@dataclass(frozen=True)
class SignedIn:
    """Who signed in at the provider, and what the person chose when the sign-in began."""

    identity: VerifiedIdentity
    project: str | None


def identify(context: ServiceContext, body: FinishSignIn, request: Request) -> SignedIn:
    """Checks that this browser has begun the sign-in, calls the provider, and verifies the ID token that it gives.
    Raises `sign_in_failed`, `csrf_failed`, and what `Identities.verify` raises."""
    refuse_other_pages(request)
    begun = _read_cookie(context, request)
    if not hmac.compare_digest(body.state.encode(), begun.state.encode()):
        raise _failed("This sign-in was begun in another browser, or another one was begun here since. Begin again.")
    provider = _provider(context, begun.provider)
    title = provider.shown
    if body.issuer is not None and body.issuer != provider.issuer:
        raise _failed(f"The answer is of another provider than {title}, where the sign-in was begun. Begin again.")
    if body.error == "access_denied":
        raise _failed(f"The sign-in was declined at {title}. Begin again, or ask there for access to Holdfast.")
    if body.error is not None:
        why = f"{body.error} {body.error_description or ''}".strip()[:_SHOWN_CHARACTERS]
        raise _failed(f"{title} refused the sign-in and says: {why}. Begin again, or ask who looks after the provider.")
    if body.code is None:
        raise _failed(f"{title} sent neither a code nor a reason. Begin again.")
    form = {
        "grant_type": "authorization_code",
        "code": body.code.get_secret_value(),
        "redirect_uri": _redirect_uri(request),
        "code_verifier": begun.verifier,
    }
    identities = identities_in(context)
    if (fetch := needs(context, provider.name)) is not None:
        wait([fetch], CALL_SECONDS)
    document = identities.keys_of(provider).document()
    try:
        id_token = _id_token(provider, document, form)
    except ProviderError as error:
        raise _unavailable(provider, error) from None
    identity = identities.verify(id_token, provider=provider.name, nonce=begun.nonce)
    if not identity.is_person:
        raise _failed(f"{title} gave a token that is not for this service. Begin again.")
    return SignedIn(identity, begun.project)


def open_session_of(context: ServiceContext, who: SignedIn, request: Request, response: Response) -> SessionView:
    """Makes a token by the rules, and opens its session. Raises what `make_token` raises."""
    try:
        token = make_token(context, who.identity, project=who.project)
    except ProblemError as error:
        raise _told_to(who.identity, error) from None
    caller = authenticate(context.database, token.access_token)
    return open_for_identity(context, caller, request, response)


def set_sign_in_cookie(request: Request, response: Response, text: str, seconds: int) -> None:
    """0 seconds: the browser drops it. No call that another site causes brings it."""
    response.set_cookie(
        cookie_name(request, SIGN_IN_COOKIE),
        text,
        max_age=seconds,
        path="/",
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )


def _provider(context: ServiceContext, name: str) -> ProviderRules:
    """As the file says now: it may have changed while the person was away."""
    provider = identities_in(context).rules.provider(name)
    if provider is None or provider.client_id is None:
        raise _failed(f"People cannot sign in at {name!r}: the identity file names no such provider. Begin again.")
    return provider


def _redirect_uri(request: Request) -> str:
    """The page's own address, which must be registered at the provider word for word."""
    return page_origin(request) + CALLBACK_PATH


# The cookie: <JSON in base64url>.<HMAC>. The key is derived, so that no signature of another purpose is good here.


def _signed(context: ServiceContext, begun: _Begun) -> str:
    said = [_base64(begun.secret), begun.provider, begun.project, begun.ends_at]
    content = _base64(json.dumps(said, separators=(",", ":")).encode())
    return f"{content}.{_signature(context, content)}"


def _signature(context: ServiceContext, content: str) -> str:
    key = hmac.new(context.signing_key, b"holdfast sign-in cookie", hashlib.sha256).digest()
    return _base64(hmac.new(key, content.encode(), hashlib.sha256).digest())


def _read_cookie(context: ServiceContext, request: Request) -> _Begun:
    text = request.cookies.get(cookie_name(request, SIGN_IN_COOKIE), "")
    content, _, signature = text.partition(".")
    if not hmac.compare_digest(signature.encode(), _signature(context, content).encode()):
        raise _failed(
            "This browser has begun no sign-in, or it has ended it already: one is good for once. Begin again."
        )
    try:
        secret, provider, project, ends_at = json.loads(_bytes(content))
        begun = _Begun(_bytes(secret), provider, project, ends_at)
    except (ValueError, TypeError, binascii.Error):  # of another version of the service
        raise _failed("The sign-in was begun with another version of the service. Begin again.") from None
    if time.time() > begun.ends_at:
        raise _failed(f"The sign-in took more than {SIGN_IN_SECONDS // 60} minutes. Begin again.")
    return begun


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


# The provider.


def _id_token(provider: ProviderRules, document: Mapping[str, Any], form: Mapping[str, str]) -> str:
    """Raises `sign_in_failed` for what the provider refuses, and ProviderError."""
    url = url_in(document, "token_endpoint")
    headers, with_secret = _client(provider, document)
    status, body = call_provider(provider, "POST", url, headers=headers, form={**form, **with_secret})
    if status >= 500 or status == 429:
        raise ProviderError(f"{url} answered {status}")
    answer = json_object_of(url, body)
    title = provider.shown
    if answer.get("error") == "invalid_grant":
        raise _failed(f"{title} does not take the code: it was used before, or it is too old. Begin again.")
    if not 200 <= status < 300:
        said = answer.get("error")
        why = said[:_SHOWN_CHARACTERS] if isinstance(said, str) else str(status)
        raise _failed(
            f"{provider.shown} refuses this service: {why}. Have an administrator compare the client of the identity "
            "file with the provider's."
        )
    token = answer.get("id_token")
    if not isinstance(token, str):
        raise _failed(f"{title} gave no ID token. Have an administrator add `openid` to its `scopes`.")
    return token


def _client(provider: ProviderRules, document: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Headers and form fields by which the provider knows this service. Raises ProviderError."""
    client_id = provider.client_id or ""
    if provider.client_secret_file is None:
        return {}, {"client_id": client_id}
    try:
        secret = provider.client_secret_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ProviderError(f"the file {provider.client_secret_file} cannot be read") from None
    ways = document.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
    if isinstance(ways, list) and "client_secret_basic" not in ways and "client_secret_post" in ways:
        return {}, {"client_id": client_id, "client_secret": secret}
    both = base64.b64encode(f"{quote(client_id, safe='')}:{quote(secret, safe='')}".encode()).decode()
    return {"Authorization": f"Basic {both}"}, {}


def _told_to(identity: VerifiedIdentity, error: ProblemError) -> ProblemError:
    """To a person who looks at the page: whom the provider takes them for, and what is missing."""
    title = identity.provider.shown
    who = f"You are signed in at {title} as {identity.shown}"
    if error.code is ProblemCode.IDENTITY_PROJECT_NEEDED:
        said = f"{who}, and may work on several projects. Choose the one that this session is for."
    elif error.code in (ProblemCode.IDENTITY_NOT_GRANTED, ProblemCode.PROJECT_NOT_FOUND):
        said = f"{who}. {error.detail}"
    else:
        return error
    return ProblemError(error.code, said, **{**error.context, "provider": identity.provider.name})


def _failed(detail: str) -> ProblemError:
    return ProblemError(ProblemCode.SIGN_IN_FAILED, detail)


def _unavailable(provider: ProviderRules, error: ProviderError) -> ProblemError:
    return ProblemError(
        ProblemCode.IDENTITY_PROVIDER_UNAVAILABLE,
        f"The provider {provider.shown} cannot be asked: {error}. Try again; a token still signs in.",
    )
