"""The guards of sessions and of the web page (rules session-is-its-token, csrf-before-write, page-from-here
and sign-in-ends-where-it-began)."""

from __future__ import annotations

from scripts.guards.guard import Guard

_CREDENTIALS = "service/holdfast_service/auth/credentials.py"
_PRINCIPAL = "service/holdfast_service/auth/principal.py"
_SESSIONS = "service/holdfast_service/auth/sessions.py"
_PAGE = "service/holdfast_service/ui/endpoints.py"
_FRAME = "service/holdfast_service/web/frame.py"
_SIGN_IN = "service/holdfast_service/identity/sign_in.py"

GUARDS = (
    Guard(
        "session-is-its-token",
        "a session outlives its token",
        _PRINCIPAL,
        "_refuse_if_over(token.revoked_at, token.expires_at, now)",
        "pass",
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "session-is-its-token",
        "a session opens another one",
        _SESSIONS,
        "if caller.session_id is not None:",
        "if False:",
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "session-is-its-token",
        "who has signed out is let in by what a process remembers",
        _PRINCIPAL,
        "or is_kind(CredentialKind.SESSION, credential):",
        "or False:",
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "session-is-its-token",
        "who has signed out reads the metrics while the database is unavailable",
        _PRINCIPAL,
        "self.from_memory and not is_kind(CredentialKind.SESSION, credential)",
        "self.from_memory",
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "csrf-before-write",
        "over plain http a page of another port calls in a person's name",
        _CREDENTIALS,
        "if site is None and origin is not None and origin.lower() not in ours:",
        "if False:",
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "csrf-before-write",
        "any page writes in a person's name",
        _CREDENTIALS,
        "if not reads and not hmac.compare_digest(sent.encode(), csrf_token(cookie).encode()):",
        "if False:",
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "csrf-before-write",
        "a page of another port calls in a person's name",
        _CREDENTIALS,
        'if site not in (None, "same-origin")',
        'if site not in (None, "same-origin", "same-site")',
        ("tests/service/test_sessions.py",),
    ),
    Guard(
        "page-from-here",
        "a link leads out of the page's folder",
        _PAGE,
        "path.resolve().is_relative_to(folder.resolve())",
        "True",
        ("tests/service/test_ui.py",),
    ),
    Guard(
        "page-from-here",
        "the page may run what a job put into it",
        _PAGE,
        "\"default-src 'self'; ",
        "\"default-src 'self' 'unsafe-inline'; ",
        ("tests/service/test_ui.py",),
    ),
    Guard(
        "page-from-here",
        "a chunk that a job has uploaded runs as a script of this origin",
        _FRAME,
        '(b"x-content-type-options", b"nosniff")',
        '(b"x-content-type-options", b"")',
        ("tests/service/test_frame.py",),
    ),
    Guard(
        "sign-in-ends-where-it-began",
        "a provider's answer to another browser signs this one in",
        _SIGN_IN,
        "if not hmac.compare_digest(body.state.encode(), begun.state.encode()):",
        "if False:",
        ("tests/service/test_sign_in.py",),
    ),
    Guard(
        "sign-in-ends-where-it-began",
        "who writes a cookie decides for how long a sign-in is good",
        _SIGN_IN,
        "if not hmac.compare_digest(signature.encode(), _signature(context, content).encode()):",
        "if not content:",
        ("tests/service/test_sign_in.py",),
    ),
)
