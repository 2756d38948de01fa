"""Signing in as a person, at a provider of OpenID Connect that the service believes. No call of these has a token.

`GET  /v1/sign-ins/providers`              -> SignInProviders
`POST /v1/sign-ins`          BeginSignIn   -> SignInBegun, and a cookie for this browser
`POST /v1/sign-ins/finish`   FinishSignIn  -> SessionView, and the session's cookie

The page goes to `url`, where the person signs in. The provider sends the browser back to CALLBACK_PATH, and the page
takes `code` and `state` from there into the third call. A command has no browser of its own: it asks the provider
itself for a device code (RFC 8628), and exchanges the ID token for a token of Holdfast.
"""

from __future__ import annotations

from pydantic import Field, SecretStr

from holdfast_protocol.base import Name, Reply, Request

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
    provider: Name
    project: Name | None = Field(
        default=None, description="For who may call for several projects: the one that the session is for."
    )


class SignInBegun(Reply):
    url: str = Field(description="Where the browser goes now: the provider's own page.")


class FinishSignIn(Request):
    """What the provider gave the browser: a code, or why there is none."""

    state: str = Field(max_length=200)
    code: SecretStr | None = Field(default=None, max_length=4000)
    error: str | None = Field(default=None, max_length=200)
    error_description: str | None = Field(default=None, max_length=1000)
    issuer: str | None = Field(default=None, max_length=1000, description="`iss`, where the provider gave one.")
