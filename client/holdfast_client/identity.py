"""A job without a token of the service: it exchanges that of its platform, and renews before the end, for weeks.

The platform's token is read anew for each exchange, because Kubernetes rotates the file. Calls renew by themselves:
there is no thread. While the service cannot exchange, calls go on with the token that they have, to its end. After it,
a job that has had a token waits as in every outage, until the platform gives a fresh one; one that never had any is
told what to correct.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from holdfast_client.errors import (
    ConfigurationError,
    HoldfastError,
    IdentityTokenEarly,
    IdentityTokenExpired,
    IdentityTokenUsed,
    ServiceUnavailable,
)
from holdfast_client.settings import ClientSettings
from holdfast_protocol.service import ExchangedToken, ExchangeToken

RENEWED_AFTER = (0.5, 0.7)
"""Of a token's life. Ranks that began together do not renew together."""
_LONGEST_PAUSE_SECONDS = 60.0
_GITHUB_URL, _GITHUB_TOKEN = "ACTIONS_ID_TOKEN_REQUEST_URL", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"

_AWS_SECONDS = 300
"""Until the end of what STS gives: it is exchanged at once."""
_AWS_MAY_PASS = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "SessionDurationEscalationException"}  # the role's keys are renewed
    | {"RequestLimitExceeded", "Throttling", "ThrottlingException"}
)
_AWS_REMEDIES = {
    "AccessDenied": "Let the role call sts:GetWebIdentityToken for this audience.",
    "OutboundWebIdentityFederationDisabledException": "Enable it once in the account: `aws iam "
    "enable-outbound-web-identity-federation`.",
}

_MAY_PASS = (ConfigurationError, IdentityTokenEarly, IdentityTokenExpired, IdentityTokenUsed)
"""The platform's next token, or a clock that is set, mends these."""

log = logging.getLogger("holdfast.client")
# Not the module's own generator: a training job draws from that one.
_spread = random.Random()  # noqa: S311  (spreads load, guards nothing)


@dataclass(frozen=True)
class _Held:
    """Moments are of the monotonic clock: those of this machine and of the service may be apart."""

    text: str
    renew_at: float
    ends_at: float


class IdentityTokens:
    """Thread-safe; one for all copies of a transport. `exchange` makes one try."""

    def __init__(
        self,
        settings: ClientSettings,
        exchange: Callable[[ExchangeToken], ExchangedToken],
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes no call."""
        self._settings = settings
        self._exchange = exchange
        self._tls = tls
        self._clock = clock
        self._renewing = threading.Lock()
        self._held: _Held | None = None
        self._had_one = False
        self._tries = 0
        self._failure: HoldfastError | None = None

    def token(self) -> str:
        """The token of the service, exchanged now if there is none, or if the one that there is ends soon. Raises
        HoldfastError if there is none that is good; ServiceUnavailable may pass."""
        held, tries = self._held, self._tries
        good = held is not None and self._clock() < held.ends_at
        if held is not None and good and self._clock() < held.renew_at:
            return held.text
        if not self._renewing.acquire(blocking=not good):
            assert held is not None
            return held.text  # another thread renews it
        try:
            if self._tries != tries:  # another thread has tried meanwhile: what it was told holds for this one
                if self._failure is not None and not good:
                    raise copy.copy(self._failure)
                if self._held is not None:
                    return self._held.text
            return self._renewed(held if good else None)
        finally:
            self._renewing.release()

    def refused(self, text: str | None) -> bool:
        """The service has not taken this token: it was revoked, or the catalog has lost it. Whether another one is
        worth a try."""
        with self._renewing:
            if self._held is not None and self._held.text == text:
                self._held = None
        return True

    def _renewed(self, held: _Held | None) -> str:
        try:
            made = self._exchange(self._request())
        except HoldfastError as error:
            failure: HoldfastError = error
            if self._had_one and isinstance(error, _MAY_PASS):
                failure = ServiceUnavailable(str(error))
            self._tries, self._failure = self._tries + 1, failure
            if held is None:
                raise failure from None
            left = held.ends_at - self._clock()
            pause = min(_LONGEST_PAUSE_SECONDS, left / 10) * _spread.uniform(0.5, 1)
            self._held = _Held(held.text, self._clock() + pause, held.ends_at)
            log.warning("The token of this job ends in %d s and was not renewed: %s", left, failure)
            return held.text
        now = self._clock()
        self._had_one = True
        self._tries, self._failure = self._tries + 1, None
        self._held = _Held(
            made.access_token, now + made.expires_in * _spread.uniform(*RENEWED_AFTER), now + made.expires_in
        )
        return made.access_token

    def _request(self) -> ExchangeToken:
        settings = self._settings
        if settings.identity_token_file is not None:
            try:
                text = settings.identity_token_file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"HOLDFAST_IDENTITY_TOKEN_FILE: {settings.identity_token_file} cannot be read "
                    f"({type(error).__name__}). Name the file that the platform mounts."
                ) from None
            source = f"HOLDFAST_IDENTITY_TOKEN_FILE: {settings.identity_token_file}"
        elif settings.identity_platform == "aws":
            text, source = self._of_aws(), "AWS STS"
        else:
            text, source = self._of_github(), "GitHub Actions"
        try:
            return ExchangeToken(subject_token=text, project=settings.identity_project, role=settings.identity_role)
        except ValidationError:  # its own sentence would repeat the token
            raise ConfigurationError(f"{source} gave no JWT. Have the platform issue one.") from None

    def _of_github(self) -> str:
        """The runner's own token for HOLDFAST_IDENTITY_AUDIENCE. Each call gives a fresh one."""
        url, bearer = os.environ.get(_GITHUB_URL), os.environ.get(_GITHUB_TOKEN)
        if not url or not bearer:
            raise ConfigurationError(
                "HOLDFAST_IDENTITY_PLATFORM is `github`, and this is no job of GitHub Actions that may ask for a "
                "token. Give the job `permissions: id-token: write`, set HOLDFAST_IDENTITY_TOKEN_FILE, or name another "
                "platform."
            )
        try:
            reply = httpx.get(
                httpx.URL(url).copy_merge_params({"audience": self._settings.identity_audience}),
                headers={"Authorization": f"Bearer {bearer}", "Accept": "application/json"},
                timeout=self._settings.timeout_seconds,
                verify=True if self._tls is None else self._tls,
            )
            value = reply.raise_for_status().json()["value"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ServiceUnavailable(f"GitHub Actions gave no token ({type(error).__name__})") from None
        return value if isinstance(value, str) else ""

    def _of_aws(self) -> str:
        """A token of STS for HOLDFAST_IDENTITY_AUDIENCE, for the role whose keys boto3 finds. They only sign the
        call."""
        try:
            from boto3.session import Session
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
        except ImportError:
            raise ConfigurationError(
                "HOLDFAST_IDENTITY_PLATFORM=aws needs boto3, and it is not installed here: `pip install boto3`. Or "
                "have something else write the token, and set HOLDFAST_IDENTITY_TOKEN_FILE."
            ) from None
        seconds = self._settings.timeout_seconds
        once = Config(connect_timeout=seconds, read_timeout=seconds, retries={"total_max_attempts": 1})
        session = Session()
        region = os.environ.get("AWS_REGION") or session.region_name
        if region is None:  # boto3 would take the global endpoint, which has no such call
            raise ConfigurationError("HOLDFAST_IDENTITY_PLATFORM=aws: set AWS_REGION to the region of this job.")
        try:
            sts = session.client("sts", region_name=region, config=once)
            if not hasattr(sts, "get_web_identity_token"):
                raise ConfigurationError(
                    "This boto3 is older than sts:GetWebIdentityToken, which HOLDFAST_IDENTITY_PLATFORM=aws calls: "
                    "`pip install --upgrade boto3`."
                )
            reply = sts.get_web_identity_token(
                Audience=[self._settings.identity_audience], SigningAlgorithm="ES384", DurationSeconds=_AWS_SECONDS
            )
        except NoCredentialsError:
            raise ConfigurationError(
                "HOLDFAST_IDENTITY_PLATFORM=aws: boto3 finds no credentials. Give the instance or the task an IAM role."
            ) from None
        except ClientError as error:
            code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status >= 500 or code in _AWS_MAY_PASS:
                raise ServiceUnavailable(f"AWS STS gave no token ({code})") from None
            remedy = _AWS_REMEDIES.get(code, "See that the role and the audience are right.")
            raise ConfigurationError(f"AWS STS gave no token ({code}). {remedy}") from None
        except BotoCoreError as error:
            raise ServiceUnavailable(f"AWS STS gave no token ({type(error).__name__})") from None
        return str(reply["WebIdentityToken"])
