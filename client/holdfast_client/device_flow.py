"""Signing in from a terminal: a device code of the person's own provider (RFC 8628), until there is an ID token.

The browser may be on another machine. The command polls as slowly as it is told to, and calls two URLs alone, which
are of the provider's own discovery document.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from holdfast_client.errors import ServiceUnavailable, SignInFailed
from holdfast_protocol.service import SignInProvider
from holdfast_protocol.stores import is_this_machine
from holdfast_protocol.text import printable

_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_DISCOVERY = "/.well-known/openid-configuration"
_USUAL_INTERVAL_SECONDS = 5.0
_SLOWER_SECONDS = 5.0
_LONGEST_INTERVAL_SECONDS = 60.0
_LONGEST_SECONDS = 1800.0
_CALL_SECONDS = 30.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class DeviceCode:
    """`url` is where the person types `user_code`; `url_with_code` spares the typing, where the provider has it."""

    url: str
    user_code: str
    url_with_code: str | None
    device_code: SecretStr
    interval_seconds: float
    expires_in_seconds: float


class DeviceFlow:
    """One sign-in at one provider. Raises SignInFailed for what does not work there, and ServiceUnavailable where it
    does not answer."""

    def __init__(self, provider: SignInProvider, tls: ssl.SSLContext) -> None:
        """Makes no call."""
        self._provider = provider
        self._http = httpx.Client(
            verify=tls,
            timeout=_CALL_SECONDS,
            follow_redirects=False,
            trust_env=not _on_loopback(provider.issuer),
            headers={"Accept": "application/json", "User-Agent": "holdfast-client"},
        )
        self._token_url = ""

    def begin(self) -> DeviceCode:
        if not _is_safe(self._provider.issuer):
            raise self._failed("is not reached by https")
        document = self._call("GET", self._provider.issuer.rstrip("/") + _DISCOVERY)
        if document.get("issuer") != self._provider.issuer:
            raise self._failed(f"calls itself {_shown(document.get('issuer'))}: the service's identity file is wrong")
        self._token_url = self._url(document, "token_endpoint")
        if "device_authorization_endpoint" not in document:
            raise self._failed("has no device flow")
        given = self._call(
            "POST",
            self._url(document, "device_authorization_endpoint"),
            {"client_id": self._provider.device_client_id or "", "scope": " ".join(self._provider.scopes)},
        )
        if "error" in given:
            raise self._failed(f"gives no device code: {_said(given)}")
        device_code, user_code = given.get("device_code"), given.get("user_code")
        # Google says verification_url.
        url = given.get("verification_uri", given.get("verification_url"))
        if not (isinstance(device_code, str) and isinstance(user_code, str) and isinstance(url, str) and _is_web(url)):
            raise self._failed("answers the request for a device code with something else")
        whole = given.get("verification_uri_complete")
        return DeviceCode(
            url=url,
            user_code=user_code,
            url_with_code=whole if isinstance(whole, str) and _is_web(whole) else None,
            device_code=SecretStr(device_code),
            interval_seconds=_seconds(given, "interval", _USUAL_INTERVAL_SECONDS),
            expires_in_seconds=min(_LONGEST_SECONDS, _seconds(given, "expires_in", _LONGEST_SECONDS)),
        )

    def wait(
        self,
        code: DeviceCode,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> SecretStr:
        """The ID token, once the person has signed in."""
        ends, interval = clock() + code.expires_in_seconds, code.interval_seconds
        form = {
            "grant_type": _GRANT,
            "device_code": code.device_code.get_secret_value(),
            "client_id": self._provider.device_client_id or "",
        }
        while clock() + interval < ends:
            sleep(interval)
            try:
                answer = self._call("POST", self._token_url, form)
            except ServiceUnavailable:
                interval = min(2 * interval, _LONGEST_INTERVAL_SECONDS)
                continue
            error = answer.get("error")
            if error is None:
                if not isinstance(token := answer.get("id_token"), str):
                    raise self._failed("gives no ID token: it must know the scope `openid`")
                return SecretStr(token)
            if error == "slow_down":
                interval = min(interval + _SLOWER_SECONDS, _LONGEST_INTERVAL_SECONDS)
            elif error == "access_denied":
                raise SignInFailed(f"The sign-in was declined at {self._provider.title}. Nothing was signed in.")
            elif error == "expired_token":
                break
            elif error != "authorization_pending":
                raise self._failed(f"refuses the sign-in: {_said(answer)}")
        raise SignInFailed(
            f"Nobody signed in at {self._provider.title} with the code {code.user_code} in time. Run `holdfast login` "
            "again for a new one."
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        try:
            reply = self._http.request(method, url, data=form)
            document = reply.json()
        except httpx.InvalidURL:
            raise self._failed("has a URL that cannot be used") from None
        except httpx.HTTPError as error:
            raise ServiceUnavailable(
                f"{self._provider.title} at {self._provider.issuer} cannot be reached from here "
                f"({type(error).__name__}). See whether this machine reaches it; a certificate of your own authority "
                "goes into HOLDFAST_CA_FILE."
            ) from None
        except ValueError:
            document = None
        if reply.status_code >= 500 or reply.status_code == 429:
            raise ServiceUnavailable(f"{self._provider.title} answers {reply.status_code}. Try again later.")
        # An error of the protocol comes with 400 or 401, and says itself what it is.
        if not isinstance(document, dict) or not (reply.is_success or "error" in document):
            raise self._failed(f"answers {reply.status_code} with something else than the protocol's")
        return document

    def _url(self, document: Mapping[str, Any], name: str) -> str:
        url = document.get(name)
        if not isinstance(url, str) or not _is_safe(url):
            raise self._failed(f"names no usable {name}")
        return url

    def _failed(self, what: str) -> SignInFailed:
        return SignInFailed(f"{self._provider.title} ({self._provider.issuer}) {what}.")


def _is_safe(url: str) -> bool:
    """A device code is worth a sign-in: https, or this machine alone."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and _on_loopback(url))


def _is_web(url: str) -> bool:
    return urlsplit(url).scheme in ("https", "http")


def _on_loopback(url: str) -> bool:
    return is_this_machine(urlsplit(url).hostname or "")


def _seconds(document: Mapping[str, Any], name: str, default: float) -> float:
    value = document.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else default


def _said(answer: Mapping[str, Any]) -> str:
    why = answer.get("error_description")
    return _shown(answer.get("error")) + (f" ({_shown(why)})" if isinstance(why, str) else "")


def _shown(text: object) -> str:
    return printable(str(text)[:_SHOWN_CHARACTERS])
