"""The web page's files: which are served, with which headers, and that nothing else is."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast_client.cli.main import app
from holdfast_service.settings import ServiceSettings
from tests.support.service import RunningService, running_service

INDEX = "<!doctype html><title>Holdfast</title><script src=/ui/assets/page-1a2b.js></script>"
SCRIPT = "document.title = 'it runs'\n" * 50


@pytest.fixture
def database_url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """No file is in the catalog: one database says it all."""
    return str(request.getfixturevalue("sqlite_catalogs").new(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "static"
    (made / "assets").mkdir(parents=True)
    (made / "index.html").write_text(INDEX)
    (made / "assets" / "page-1a2b.js").write_text(SCRIPT)
    (made / "favicon.svg").write_text("<svg/>")
    (made / ".env").write_text("hunter2")
    (made / "page.py").write_text("hunter2")
    (tmp_path / "secret.txt").write_text("hunter2")
    return made


@pytest.fixture
def service(settings: ServiceSettings, folder: Path) -> Iterator[RunningService]:
    with running_service(settings, page_folder=folder) as running:
        yield running


def test_the_page_is_there_without_a_token_and_each_place_within_it(service: RunningService) -> None:
    http = service.http(token=None)
    for path in ("/ui/", "/ui/runs/demo/gpt", "/ui/runs/demo/gpt-1.5", "/ui/index.html"):
        reply = http.get(path)
        assert (reply.status_code, reply.text) == (200, INDEX), path
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        assert reply.headers["Cache-Control"] == "no-cache"
        assert http.head(path).status_code == 200
    assert http.get("/ui/runs/demo/train.js", headers={"Accept": "text/html, */*"}).text == INDEX
    for path in ("assets/none.js", "none.js", "favicon.ico"):
        assert http.get(f"/ui/{path}").status_code == 404, "no script's place is taken by a page"
    for path in ("/", "/ui"):
        reply = http.get(path)
        assert (reply.status_code, reply.headers["Location"]) == (307, "/ui/")


def test_what_has_its_hash_in_its_name_is_kept_for_ever_and_sent_packed(service: RunningService) -> None:
    http = service.http(token=None)
    reply = http.get("/ui/assets/page-1a2b.js", headers={"Accept-Encoding": "gzip"})
    assert reply.text == SCRIPT
    assert reply.headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert reply.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert (reply.headers["Content-Encoding"], reply.headers["Vary"]) == ("gzip", "Accept-Encoding")
    assert int(reply.headers["Content-Length"]) == len(gzip.compress(SCRIPT.encode())) < len(SCRIPT)
    plain = http.get("/ui/assets/page-1a2b.js", headers={"Accept-Encoding": "identity"})
    assert (plain.text, "Content-Encoding" in plain.headers) == (SCRIPT, False)
    unchanged = http.get("/ui/", headers={"If-None-Match": http.get("/ui/").headers["ETag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_a_page_that_is_built_anew_is_served_without_a_restart(service: RunningService, folder: Path) -> None:
    http = service.http(token=None)
    assert http.get("/ui/").text == INDEX
    (folder / "index.html").write_text("another")
    os.utime(folder / "index.html", ns=(1, 1))
    assert http.get("/ui/").text == "another"


@pytest.mark.rule("page-from-here")
def test_each_reply_says_that_nothing_is_loaded_from_elsewhere(service: RunningService) -> None:
    for path in ("/ui/", "/ui/assets/page-1a2b.js", "/ui/favicon.svg", "/ui/none.js"):
        headers = service.http(token=None).get(path).headers
        policy = dict(each.strip().split(" ", 1) for each in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert not {"script-src", "style-src", "connect-src"} & set(policy), "they are as default-src has it"
        assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"


@pytest.mark.rule("page-from-here")
@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "%2e%2e/secret.txt",
        "..%2fsecret.txt",
        "assets/../../secret.txt",
        "assets/..%2f..%2fsecret.txt",
        "%2fetc/hosts.txt",
        "/../secret.txt",
        "..\\secret.txt",
        "link.txt",
        "inside/secret.txt",
        "page.py",
        ".env",
        "none.js",
        "a%00b.txt",
    ],
)
def test_nothing_beside_the_page_is_served(service: RunningService, folder: Path, path: str) -> None:
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "inside").symlink_to(folder.parent)
    reply = service.http(token=None).get(f"/ui/{path}")
    assert "hunter2" not in reply.text
    assert reply.status_code == 404 or reply.text == INDEX


@pytest.mark.parametrize("letters", [300, 5000], ids=["than a name", "than a path"])
@pytest.mark.parametrize("folder_of_it", ["", "assets/", "a/"])
def test_no_file_is_there_by_a_name_that_is_longer(service: RunningService, letters: int, folder_of_it: str) -> None:
    reply = service.http(token=None).get(f"/ui/{folder_of_it}{'a' * letters}.js")
    assert (reply.status_code, reply.headers["Content-Type"]) == (404, "text/plain; charset=utf-8")


def test_a_page_that_was_not_built_says_how(settings: ServiceSettings, tmp_path: Path) -> None:
    with running_service(settings, page_folder=tmp_path / "none") as service:
        reply = service.http(token=None).get("/ui/")
        assert reply.status_code == 503
        assert "scripts/prepare-web" in reply.text
        assert reply.headers["Content-Type"].startswith("text/plain")
        assert service.http().get("/v1/service").status_code == 200


@pytest.fixture
def as_client(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The commands of this test call the service; the link's beginning."""
    monkeypatch.setenv("HOLDFAST_URL", service.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", service.token())
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return f"{service.url}/ui/#code="


@pytest.mark.parametrize("options", [["--no-browser"], []], ids=["no browser is wanted", "no screen"])
def test_holdfast_ui_prints_a_link_that_signs_in_once(
    service: RunningService, as_client: str, options: list[str]
) -> None:
    done = CliRunner().invoke(app, ["ui", *options])
    assert (done.exit_code, done.stdout.startswith(as_client)) == (0, True), done.output
    code = done.stdout.strip().removeprefix(as_client)
    assert re.fullmatch(r"code_[0-9a-f]{16}_[0-9a-f]{64}", code)
    assert [service.http(token=code).post("/v1/sessions").status_code for _ in range(2)] == [201, 401]


def test_holdfast_ui_hands_the_link_to_a_browser(
    as_client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, given = tmp_path / "browser", tmp_path / "given"
    browser.write_text(f'#!/bin/sh\necho "$1" > {given}\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    done = CliRunner().invoke(app, ["ui"])
    assert done.exit_code == 0, done.output
    assert given.read_text().startswith(as_client)
    assert "code" not in done.output


def test_holdfast_ui_says_what_is_missing(
    service: RunningService, as_client: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "index.html").unlink()
    done = CliRunner().invoke(app, ["ui"])
    assert (done.exit_code, "scripts/prepare-web" in done.stderr) == (1, True), done.output
    monkeypatch.setenv("HOLDFAST_TOKEN", "hold_unknown")
    done = CliRunner().invoke(app, ["ui"])
    assert (done.exit_code, "token" in done.stderr) == (4, True), done.output
