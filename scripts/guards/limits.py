"""The guards of what a call may cost (rule limits-before-work)."""

from __future__ import annotations

from scripts.guards.guard import Guard

GUARDS = (
    Guard(
        "limits-before-work",
        "a body is read without a limit",
        "service/holdfast_service/web/frame.py",
        "if len(body) > self.most_bytes:",
        "if False:",
        ("tests/service/test_request_limits.py",),
    ),
    Guard(
        "limits-before-work",
        "a body that nobody sends is waited for",
        "service/holdfast_service/web/frame.py",
        "asyncio.timeout_at(begun + BODY_SECONDS + len(body) / _SLOWEST_BYTES_PER_SECOND)",
        "asyncio.timeout_at(begun + 600 + len(body))",
        ("tests/service/test_request_limits.py",),
    ),
    Guard(
        "limits-before-work",
        "the head of a request is waited for, for ever",
        "service/holdfast_service/web/connections.py",
        "if self._deadline is None:",
        "if False:",
        ("tests/service/test_connections.py",),
    ),
    Guard(
        "limits-before-work",
        "idle connections keep new callers out",
        "service/holdfast_service/web/connections.py",
        "idle = next(iter(waiting), None)",
        "idle = None",
        ("tests/service/test_connections.py",),
    ),
    Guard(
        "limits-before-work",
        "a page reads this machine through a browser",
        "service/holdfast_service/web/frame.py",
        "or self._allows(name):",
        "or True:",
        ("tests/unit/test_host_names.py",),
    ),
    Guard(
        "limits-before-work",
        "a quota is changed by who has not seen it",
        "service/holdfast_service/runs/projects.py",
        'refuse_unless_seen("the project\'s quota", etag_of(project), if_match',
        "refuse_unless_seen(\"the project's quota\", etag_of(project), '*'",
        ("tests/service/test_quota_edits.py",),
    ),
    Guard(
        "limits-before-work",
        "true is 1",
        "service/holdfast_service/web/frame.py",
        "self.model.validate_json(body, strict=True)",
        "self.model.validate_json(body)",
        ("tests/service/test_quota_edits.py",),
    ),
    Guard(
        "limits-before-work",
        "escape sequences reach the terminal",
        "client/holdfast_client/cli/say.py",
        "sys.stdout.write(printable(text)",
        "sys.stdout.write((text)",
        ("tests/unit/test_cli_texts.py",),
    ),
    Guard(
        "limits-before-work",
        "a client makes time series with names of methods",
        "service/holdfast_service/web/frame.py",
        'scope["method"] if scope["method"] in _METHODS else "other"',
        'scope["method"]',
        ("tests/service/test_metrics.py",),
    ),
    Guard(
        "limits-before-work",
        "a stranger's body is read before the token",
        "service/holdfast_service/web/frame.py",
        "                if caller is None:",
        "                if False:",
        ("tests/service/test_request_limits.py",),
    ),
    Guard(
        "limits-before-work",
        "wrong tokens are tried as fast as they come",
        "service/holdfast_service/auth/principal.py",
        "                self._failed(address, fingerprint, counted=counted)",
        "                pass",
        ("tests/service/test_request_limits.py",),
    ),
    Guard(
        "limits-before-work",
        "a text may hold escape sequences",
        "client/holdfast_protocol/text.py",
        "return _NOT_TEXT.search(text) is None and",
        "return True and",
        ("tests/unit/test_request_bounds.py",),
    ),
)
