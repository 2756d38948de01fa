"""A page of another origin can do nothing with the browser of a signed-in person. The browser is a real one, because
its own guards (SameSite, same origin, CSP) are part of what holds."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Response, expect

from tests.support.rank import Job, answer
from tests.support.service import RunningService

INJECTED = """<!doctype html><title>before</title>
<script>document.title = "an inline script has run"</script>
<img src="/none.png" onerror="document.title = 'a handler has run'">"""


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny page, and one that has an attacker's scripts in it."""
    folder = tmp_path_factory.mktemp("page") / "static"
    shutil.copytree(Path(__file__).parent / "tiny_page", folder)
    (folder / "injected.html").write_text(INJECTED)
    return folder


@pytest.fixture
def neighbour() -> Iterator[str]:
    """A web server on another port of this host: of the same site, so the browser sends the cookie along."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>neighbour</title>")

        def log_message(self, *_said: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def in_json(response: Response) -> tuple[int, str]:
    return response.status, response.json().get("code", "")


def test_a_page_of_another_port_neither_writes_nor_reads(
    signed_in: Page, context: BrowserContext, service: RunningService, neighbour: str
) -> None:
    other = context.new_page()
    other.goto(neighbour)
    before = answer(service.http().get("/v1/audit-events"))["items"]
    calls = {
        "POST": f"{service.url}/v1/controllers/collect/run",
        "GET": f"{service.url}/v1/projects",
    }
    for method, url in calls.items():
        with other.expect_response(url) as reply:
            other.evaluate(
                "([url, method]) => fetch(url, {method, mode: 'no-cors', credentials: 'include'}).catch(() => 0)",
                [url, method],
            )
        assert reply.value.status == 403, "and not 401: the browser did send the cookie"
    other.set_content(f"<form method=post action={calls['POST']}><button>Win</button></form>")
    with other.expect_response(calls["POST"]) as posted:
        other.get_by_role("button").click()
    assert in_json(posted.value) == (403, "csrf_failed")
    # Only for those whom the browser asks in advance.
    other.goto(neighbour)
    failed = other.evaluate(
        "url => fetch(url, {method: 'DELETE', credentials: 'include', headers: {'X-Holdfast-CSRF': 'x'}})"
        ".then(reply => reply.status, error => error.name)",
        f"{service.url}/v1/sessions/current",
    )
    assert failed == "TypeError"
    assert answer(service.http().get("/v1/audit-events"))["items"] == before
    assert signed_in.evaluate("() => fetch('/v1/projects').then(reply => reply.status)") == 200


def add(kind: str, source: str) -> str:
    """A script that adds such an element to the page."""
    return f"() => {{ const it = document.createElement('{kind}'); it.src = '{source}'; document.body.append(it); }}"


def test_no_page_can_frame_this_one(browser: Browser, service: RunningService, neighbour: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(neighbour)
        with page.expect_event("requestfailed") as refused:
            page.evaluate(add("iframe", f"{service.url}/ui/"))
        assert refused.value.failure == "net::ERR_BLOCKED_BY_RESPONSE"


def test_the_page_runs_no_script_but_its_files(browser: Browser, service: RunningService) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(f"{service.url}/ui/injected.html")
        expect(page).to_have_title("before")
        for kind, source in (("script", "https://elsewhere.example/x.js"), ("img", "https://elsewhere.example/x.png")):
            with page.expect_console_message(lambda message, source=source: source in message.text) as refused:
                page.evaluate(add(kind, source))
            assert "Content Security Policy" in refused.value.text
        sent = page.evaluate("() => fetch('https://elsewhere.example/').then(() => 'sent', error => error.name)")
        assert sent == "TypeError"
        assert len([text for text in said if "inline" in text and "Content Security Policy" in text]) == 2


def test_events_come_to_the_page_by_cookie(signed_in: Page, service: RunningService) -> None:
    signed_in.evaluate(
        """() => { const source = new EventSource('/v1/events/stream');
        source.addEventListener('checkpoint.committed', event => { document.title = event.type; });
        return new Promise(done => { source.onopen = () => done(0); }); }"""
    )
    Job(service.http(), "demo/gpt", world_size=1).save(1)
    expect(signed_in).to_have_title("checkpoint.committed")
