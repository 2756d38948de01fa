"""The OpenAPI document: who may call, what each tag is about; and errors that are never sent go out."""

from __future__ import annotations

from typing import Any

from holdfast_protocol.service import CSRF_HEADER, SESSION_COOKIE

TAGS = {
    "projects": "What belongs to one team: its runs, its quota.",
    "runs": "One training job over all its launches: its state, its goodput, and how often it should save.",
    "attempts": "The launches of a run. The newest one alone may write.",
    "checkpoints": "A step of a run: begun, uploaded shard by shard, sealed, committed; pinned, edited, taken back.",
    "uploads": "Which chunks of a shard the store lacks, and the tickets to upload them.",
    "restores": "The restore point of a run, and the tickets to read a checkpoint.",
    "policies": "What a project or a run wants of retention, copies and tiers, and its objectives (RPO, RTO).",
    "retention": "What a policy keeps and why; expiring what was shown; deleting by hand.",
    "holds": "What no policy and no person takes away.",
    "copies": "Copies in a second store: how far behind it is, and restores from it alone.",
    "scrubs": "Reading stored bytes again, and what a bad chunk means.",
    "tiers": "What gets cold when, and thawing it.",
    "usage": "Bytes and what they cost.",
    "samples": "Bytes, cost, goodput and the age of restore points, hour by hour.",
    "prices": "The price list that costs are counted with.",
    "collections": "Deleting the copies that nothing needs.",
    "sweeps": "Objects in a store that no row of the catalog knows.",
    "stores": "The attached stores, and whose they are.",
    "catalog": "The catalog compared with its stores, and what a rebuild could not know.",
    "operations": "Long work that a call has started: how far it is, and what came of it.",
    "controllers": "Background work: what is due, its lag, its errors.",
    "workers": "The processes that serve or do background work.",
    "events": "What happens to runs, checkpoints and stores: listed, and followed.",
    "audit": "Who changed what, and why.",
    "webhooks": "URLs that are called when something happens.",
    "tokens": "Who may call what.",
    "sessions": "Signing in to the web page: a session stands for its token.",
    "service": "The service itself: its version and what the token may do.",
    "health": "For load balancers and for Prometheus.",
    "objects": "The objects of a store that is a folder, by signed URLs.",
}
OPEN: dict[str, Any] = {"security": []}
"""For `openapi_extra=`: the route takes no token."""

_SCHEME = "token"
_BY_COOKIE = "session"
# FastAPI's own form of a 422; web/problem_reply.py answers with a Problem instead, which 4XX stands for.
_NEVER_SENT = ("HTTPValidationError", "ValidationError")


def finished(schema: dict[str, Any]) -> dict[str, Any]:
    """The same document, changed in place; twice is fine."""
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {
        _SCHEME: {"type": "http", "scheme": "bearer", "description": "`hold_<id>_<secret>`, from POST /v1/tokens."},
        _BY_COOKIE: {
            "type": "apiKey",
            "in": "cookie",
            "name": SESSION_COOKIE,
            "description": f"From POST /v1/sessions; over https `__Host-{SESSION_COOKIE}`. A call that is no GET or "
            f"HEAD needs the session's `csrf_token` in the header {CSRF_HEADER}, too.",
        },
    }
    schema["security"] = [{_SCHEME: []}, {_BY_COOKIE: []}]
    schema["servers"] = [{"url": "/", "description": "The service that this document comes from."}]
    schema["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    for name in _NEVER_SENT:
        components.get("schemas", {}).pop(name, None)
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    return schema
