"""`holdfast doctor`: checks the way to the service and its store, and says what to fix."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel

from holdfast_client.chunks.transfer import get_chunk, put_chunk
from holdfast_client.cli.arguments import JsonOption, connect
from holdfast_client.cli.output import ExitCode, exit_code_of, show_facts, show_json
from holdfast_client.client import Client, end_of_token
from holdfast_client.errors import (
    DirectFileRefused,
    HoldfastError,
    IntegrityError,
    RouteNotFound,
    ServiceUnavailable,
    StoreProblem,
    TokenProblem,
    UnsupportedProtocol,
)
from holdfast_protocol.base import PROTOCOL_VERSION
from holdfast_protocol.checkpoints import UploadTicket
from holdfast_protocol.restores import ReadTicket
from holdfast_protocol.service import ServerInfo
from holdfast_protocol.states import Scope
from holdfast_protocol.stores import MakeSample, StoreClock

doctor = typer.Typer(rich_markup_mode=None)


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    SKIPPED = "skipped"
    FAILED = "failed"


class Finding(BaseModel):
    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    exit_code: int = 1


def good(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, detail=detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, detail=detail, remedy=remedy)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict=Verdict.SKIPPED, detail=detail)


def failed(check: str, detail: str, remedy: str, exit_code: int) -> Finding:
    return Finding(check=check, verdict=Verdict.FAILED, detail=detail, remedy=remedy, exit_code=exit_code)


SIZE_BYTES = 64 * 1024


def round_trip(client: Client) -> str:
    """Sends a sample to the store, reads it back over the wire of a training job's chunks, and deletes it. Returns what
    was done, for people. Raises HoldfastError if it fails.

    offer -> upload -> the service asks the store -> fetch, compare -> delete"""
    body = os.urandom(SIZE_BYTES)
    digest = hashlib.sha256(body).hexdigest()
    md5 = hashlib.md5(body, usedforsecurity=False).hexdigest() if client.store_asks_md5() else None
    offer = client.samples.create(MakeSample(digest=digest, bytes=SIZE_BYTES, md5=md5))
    try:
        if offer.ticket.kind == "file":
            client.mount.check_write(offer.ticket.path)
        put_chunk(offer.ticket, memoryview(body), client.transfers)
        checked = client.samples.check(offer.id)
        if checked.ticket.kind == "file":
            client.mount.check_read(checked.ticket.path)
        if get_chunk(checked.ticket, None, digest, SIZE_BYTES, client.transfers) != body:
            raise IntegrityError("The bytes read back are not the saved ones")
    finally:
        client.samples.delete(offer.id)
    by_store = "which the store has hashed too" if checked.hashed_by_store else "which the store has not hashed"
    return f"{SIZE_BYTES // 1024} KiB went to the store and back, {by_store}{_by_mount(client, body, digest)}"


def _by_mount(client: Client, body: bytes, digest: str) -> str:
    """Writes, reads and removes a file in the store's own folder, as jobs on this machine do without HTTP. Returns what
    came of it, for people; nothing without a mount."""
    path = client.mount.new_file()
    if path is None:
        return ""
    written = UploadTicket(kind="file", path=path, expires_in_seconds=60)
    read = ReadTicket(
        kind="file", path=path, digest=digest, bytes=SIZE_BYTES, stored_bytes=SIZE_BYTES, expires_in_seconds=60
    )
    try:
        put_chunk(written, memoryview(body), client.transfers)
        get_chunk(read, None, digest, SIZE_BYTES, client.transfers)
    except (DirectFileRefused, ServiceUnavailable, StoreProblem) as error:
        return f"; this machine sees the store's mount, and jobs do not use it: {error}".rstrip(".")
    finally:
        with suppress(OSError):
            os.unlink(path)
    return "; this machine sees the store's mount, and reads and writes there"


MOST_SKEW_SECONDS = 30.0
MOST_STORE_SKEW_SECONDS = 60.0
"""NTP keeps clocks within a second; clocks a minute apart may soon make the store refuse signed URLs."""


_SHOWN_BY_WORKERS = "`holdfast workers list` shows which process has which store."
_SHOWN_BY_LIST = "`holdfast stores list` shows what each store does not enforce, and when it was last tried."


def check_all(client: Client) -> Iterator[Finding]:
    """The findings of all checks; none raises. Each check comes after those that it needs, and it ends early if no
    further check could succeed.

    url -> service -> token and protocol -> clock -> database and store -> the stores' clocks -> round trip"""
    yield check_url(client)
    if not client.service.healthy():
        yield not_alive(client)
        return
    asked_at = datetime.now(UTC)
    try:
        info = client.service.info()
    except HoldfastError as error:
        kind = {TokenProblem: "token", UnsupportedProtocol: "protocol"}
        check = next((name for of, name in kind.items() if isinstance(error, of)), "service")
        yield failed(check, str(error), "", exit_code_of(error))
        return
    middle = asked_at + (datetime.now(UTC) - asked_at) / 2
    yield good("service", f"version {info.version}, catalog {info.catalog_id}, epoch {info.epoch}")
    yield good("protocol", f"the service speaks {info.protocol}, this client {PROTOCOL_VERSION}")
    yield check_token(info)
    yield check_clock(info, middle)
    yield from check_ready(client)
    yield from check_store_clocks(client)
    yield check_round_trip(client, info)


def check_url(client: Client) -> Finding:
    url = client.settings.url
    if urlsplit(url).scheme == "http" and not client.settings.on_loopback:
        return warning(
            "url", f"{url} is not encrypted: the token can be read on its way", "Use https:// in HOLDFAST_URL."
        )
    return good("url", url)


def not_alive(client: Client) -> Finding:
    url = client.settings.url
    try:
        if url.startswith("https:"):
            client.service.ready()  # says whether a certificate is the reason
    except HoldfastError as error:
        return failed("service", str(error), "", exit_code_of(error))
    return failed(
        "service",
        f"no service answers at {url}/healthz",
        "Start it with `holdfast serve`, or set HOLDFAST_URL to where it runs.",
        ExitCode.UNAVAILABLE,
    )


def check_token(info: ServerInfo) -> Finding:
    scopes = " ".join(scope.value for scope in info.token_scopes)
    where = f"project {info.token_project}" if info.token_project else "every project"
    detail = f"{info.token_name}: {scopes}, in {where}"
    ending = end_of_token(info)
    return good("token", detail) if ending is None else warning("token", detail, ending)


def check_clock(info: ServerInfo, now: datetime) -> Finding:
    ahead_seconds = (now - info.now).total_seconds()
    if abs(ahead_seconds) <= MOST_SKEW_SECONDS:
        return good("clock", f"{abs(ahead_seconds):.1f} s from the service's")
    side = "ahead of" if ahead_seconds > 0 else "behind"
    return warning(
        "clock",
        f"this machine is {abs(ahead_seconds):.0f} s {side} the service",
        "Set both clocks by NTP: stores refuse signed URLs that are off by 15 minutes.",
    )


def check_ready(client: Client) -> Iterator[Finding]:
    remedies = {
        "database": "See that the database runs and HOLDFAST_DATABASE_URL is right, where the service runs.",
        "migrations": "Start the service of this version once; it migrates its database.",
        "store": "See that the store runs, has room, and lets the service in (HOLDFAST_STORE).",
    }
    try:
        readiness = client.service.ready()
    except HoldfastError as error:
        yield failed("ready", str(error), "", exit_code_of(error))
        return
    for check in readiness.checks:
        if check.ok:
            yield good(check.name, check.detail or "answers")
        else:
            yield failed(check.name, check.detail, remedies[check.name], ExitCode.UNAVAILABLE)
    for sentence in readiness.warnings:
        yield warning("stores", sentence, _SHOWN_BY_WORKERS if sentence not in readiness.weaknesses else _SHOWN_BY_LIST)


def check_store_clocks(client: Client) -> Iterator[Finding]:
    """The service's clock dates its signatures, and the store's clock judges them."""
    try:
        clocks = client.service.store_clocks()
    except RouteNotFound:
        return  # an older service does not tell
    except HoldfastError as error:
        yield failed("store clock", str(error), "", exit_code_of(error))
        return
    for clock in clocks:
        yield _store_clock(clock)


def _store_clock(clock: StoreClock) -> Finding:
    if clock.ahead_seconds is None:
        return skipped("store clock", f"{clock.role} store: {clock.problem}")
    apart = abs(clock.ahead_seconds)
    side = "ahead of" if clock.ahead_seconds > 0 else "behind"
    told = f"the {clock.role} store's clock is {apart:.1f} s {side} the service's"
    remedy = "Set the clocks of the service's machine and of the store by NTP."
    if clock.tolerated_seconds is not None and apart >= clock.tolerated_seconds:
        refuses = f"{told}: from {clock.tolerated_seconds:g} s on it refuses every signed URL"
        return failed("store clock", refuses, remedy, ExitCode.UNAVAILABLE)
    return warning("store clock", told, remedy) if apart > MOST_STORE_SKEW_SECONDS else good("store clock", told)


def check_round_trip(client: Client, info: ServerInfo) -> Finding:
    if Scope.TRAIN not in info.token_scopes:
        return skipped("round trip", "this token may not write (it has no scope train)")
    try:
        return good("round trip", round_trip(client))
    except HoldfastError as error:
        return failed("round trip", str(error), "", exit_code_of(error))


@doctor.command("doctor")
def check(json: JsonOption = False) -> None:
    """Check the way to the service and its store, and say what to fix. A sample goes there and back; nothing stays."""
    findings: list[Finding] = []
    with connect() as client:
        for finding in check_all(client):
            findings.append(finding)
            if not json:
                _show(finding)
    if json:
        show_json(findings)
    failures = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    if failures:
        raise typer.Exit(failures[0].exit_code)


def _show(finding: Finding) -> None:
    rest = finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else "")
    show_facts([(f"{finding.check:<12}{finding.verdict.value:<8}", rest)])
