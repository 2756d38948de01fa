"""`holdfast login` and `logout`: a person's token, by the person's own provider."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from typing import Annotated

import typer
from pydantic import SecretStr

from holdfast_client.certificates import tls_of
from holdfast_client.cli.arguments import JsonOption, connect
from holdfast_client.cli.output import as_time, show_facts, show_json
from holdfast_client.cli.projects import has_screen
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import Client
from holdfast_client.device_flow import DeviceFlow
from holdfast_client.errors import ConfigurationError, HoldfastError, SignInFailed, Unauthenticated
from holdfast_client.logins import Login, keep_login, read_login
from holdfast_client.settings import ClientSettings
from holdfast_protocol.service import ID_TOKEN_TYPE, ExchangeToken, SignInProvider, TokenView
from holdfast_protocol.states import Role

login = typer.Typer(rich_markup_mode=None)
logout = typer.Typer(rich_markup_mode=None)


@login.command("login")
def sign_in(
    provider: Annotated[
        str | None, typer.Option("--provider", metavar="NAME", help="Where to sign in, if there are several places.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", metavar="NAME", help="The one that the token is for, if there are several."),
    ] = None,
    role: Annotated[Role | None, typer.Option(help="Only this one of your roles.")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser, if there is one.")] = True,
    json: JsonOption = False,
) -> None:
    """Sign in at your provider, in a browser here or elsewhere.

    Commands of this user then call HOLDFAST_URL with a token of yours, until it
    ends. HOLDFAST_TOKEN, if it is set, goes first.
    """
    with connect() as client:
        settings = client.settings
        chosen = _choose(client.tokens.providers().items, provider, settings.url)
        before = read_login(settings.login_file, settings.url, to_revoke=True)
        with DeviceFlow(chosen, tls_of(settings)) as flow:
            code = flow.begin()
            show_note(f"Open {code.url} in any browser, sign in, and enter the code {code.user_code}.")
            link = code.url_with_code or code.url
            if browser and has_screen() and webbrowser.open(link):
                show_note(f"Opened {link} in your browser. See that it shows this code.")
            id_token = flow.wait(code)
        made = client.tokens.exchange(
            ExchangeToken(
                subject_token=id_token.get_secret_value(),
                subject_token_type=ID_TOKEN_TYPE,
                project=project,
                role=role,
            )
        )
        kept = Login(
            url=settings.url,
            token=SecretStr(made.access_token),
            token_id=made.id,
            name=made.name,
            expires_at=made.expires_at,
        )
        keep_login(settings.login_file, kept)
    if before is not None:
        with suppress(HoldfastError):  # it ends by itself
            _revoke(settings, before)
    if json:
        show_json(made)
    else:
        show_facts(
            (
                ("signed in as", made.name),
                ("project", made.project or "(all)"),
                ("roles", " ".join(made.roles)),
                ("ends (UTC)", as_time(made.expires_at)),
                ("kept in", str(settings.login_file)),
            )
        )
    if settings.token is not None:
        show_note("HOLDFAST_TOKEN is set, and goes first: commands call with that one, and not with this sign-in.")


@logout.command("logout")
def sign_out(json: JsonOption = False) -> None:
    """Revoke the token of `holdfast login`, and remove it from this machine."""
    settings = ClientSettings()
    found = read_login(settings.login_file, settings.url, to_revoke=True)
    revoked: TokenView | None = None
    if found is not None:
        with suppress(Unauthenticated):  # it is over already
            revoked = _revoke(settings, found)
        settings.login_file.unlink(missing_ok=True)
    if json:
        show_json(revoked)
    elif found is None:
        show_line(f"Nobody has signed in to {settings.url} here.")
    else:
        show_line(f"{found.name} is signed out of {settings.url}, and the token is revoked.")


def _revoke(settings: ClientSettings, kept: Login) -> TokenView:
    with Client(settings.model_copy(update={"token": kept.token, "retry_seconds": 0.0})) as client:
        return client.tokens.revoke_own()


def _choose(offered: list[SignInProvider], name: str | None, url: str) -> SignInProvider:
    if not offered:
        raise SignInFailed(
            f"The service at {url} knows no provider where people sign in. Set HOLDFAST_TOKEN to a token of yours."
        )
    names = ", ".join(each.name for each in offered)
    fitting = [each for each in offered if name in (None, each.name)]
    if len(fitting) > 1:
        raise ConfigurationError(f"Say where to sign in: `holdfast login --provider NAME`, with one of {names}.")
    if not fitting:
        raise ConfigurationError(f"There is no provider {name!r}. There are: {names}.")
    (chosen,) = fitting
    if chosen.device_client_id is None:
        raise SignInFailed(
            f"Commands cannot sign in at {chosen.title}: the service has a client with a secret there. Have an "
            "administrator add `device_client_id`, a public client, to the identity file; the web page signs you in."
        )
    return chosen
