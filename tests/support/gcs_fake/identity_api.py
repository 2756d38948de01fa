"""Who somebody is: Google's token server, the metadata server of a machine, and IAM's signBlob."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote

from tests.support.gcs_fake.accounts import IAM_SCOPES, TOKEN_SECONDS, Accounts
from tests.support.gcs_fake.replies import Refusal, Reply, json_reply

_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
# Google's own, whatever address the token server has.
_AUDIENCE = "https://oauth2.googleapis.com/token"
_SIGN_BLOB = re.compile(r"/v1/projects/-/serviceAccounts/(?P<email>[^/:]+):signBlob")
_MACHINES_ACCOUNT = re.compile(
    r"/computeMetadata/v1/instance/service-accounts/(?:default|[^/]+@[^/]+)/(?P<what>token)?"
)
_FLAVOR = {"metadata-flavor": "Google", "server": "Metadata Server for VM"}


def token(accounts: Accounts, body: bytes) -> Reply:
    """A token for a JWT that the account's key has signed."""
    form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
    try:
        head, claims, signature = form["assertion"].split(".")
        header, asked = json.loads(_decode(head)), json.loads(_decode(claims))
        account = accounts.find(asked["iss"])
        good = (
            form["grant_type"] == _GRANT
            and header["alg"] == "RS256"
            and asked["aud"] == _AUDIENCE
            and asked["iat"] - 300 <= time.time() < asked["exp"] <= asked["iat"] + 3600
            and account is not None
            and account.has_signed(f"{head}.{claims}".encode(), _decode(signature))
        )
    except (KeyError, ValueError):
        good = False
    if not good:
        return json_reply({"error": "invalid_grant", "error_description": "Invalid JWT Signature."}, 400)
    return _token(accounts, asked["iss"], asked["scope"])


def metadata(accounts: Accounts, machine: str, path: str, query: str, headers: Mapping[str, list[str]]) -> Reply:
    """What the metadata server tells a machine about its own account, `machine`."""
    if headers.get("metadata-flavor") != ["Google"]:
        return Reply(403, dict(_FLAVOR))
    if path == "/":
        return Reply(200, dict(_FLAVOR))
    if path == "/computeMetadata/v1/project/project-id":
        return Reply(200, {**_FLAVOR, "content-type": "application/text"}, b"tests")
    found = _MACHINES_ACCOUNT.fullmatch(path)
    if found is None:
        return Reply(404, dict(_FLAVOR))
    if found["what"] == "token":
        scopes = parse_qs(query).get("scopes", ["https://www.googleapis.com/auth/cloud-platform"])[0]
        reply = _token(accounts, machine, scopes.replace(",", " "))
    else:
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        reply = json_reply({"email": machine, "aliases": ["default"], "scopes": scopes})
    return Reply(reply.status, {**reply.headers, **_FLAVOR}, reply.body)


def sign_blob(accounts: Accounts, path: str, headers: Mapping[str, list[str]], body: bytes) -> Reply | None:
    """A signature with the key that Google keeps; None if the path is another's."""
    found = _SIGN_BLOB.fullmatch(path)
    if found is None:
        return None
    caller = accounts.who(headers.get("authorization", [""])[0], IAM_SCOPES)
    account = accounts.find(unquote(found["email"]))
    if account is None or caller.email not in account.signed_for_by:
        error = {
            "code": 403,
            "message": "Permission iam.serviceAccounts.signBlob denied.",
            "status": "PERMISSION_DENIED",
        }
        return json_reply({"error": error}, 403)
    try:
        message = base64.b64decode(json.loads(body)["payload"], validate=True)
    except (ValueError, KeyError):
        raise Refusal(400, "InvalidArgument", "The payload is no base64.") from None
    return json_reply({"keyId": "googles", "signedBlob": base64.b64encode(account.sign(message)).decode()})


def _token(accounts: Accounts, email: str, scopes: str) -> Reply:
    fresh = accounts.new_token(email, scopes)
    return json_reply({"access_token": fresh, "expires_in": TOKEN_SECONDS, "token_type": "Bearer"})


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
