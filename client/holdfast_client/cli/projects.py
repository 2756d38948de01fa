"""`holdfast projects`, `tokens`, `whoami`, `sessions` and `ui`. `trash` deletes and undeletes projects."""

from __future__ import annotations

import os
import re
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC
from fractions import Fraction
from typing import Annotated

import typer

from holdfast_client.cli.arguments import (
    DeletedOption,
    JsonOption,
    LimitedOption,
    LimitOption,
    ProjectArgument,
    SinceOption,
    UntilOption,
    connect,
    first,
    read_duration,
    read_lifetime,
    read_past,
    say_if_cut,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.client import end_of_token
from holdfast_client.errors import EditNeedsVersion, HoldfastError
from holdfast_protocol.base import LARGEST_INTEGER
from holdfast_protocol.pruning import InTrash
from holdfast_protocol.runs import EditProject, ProjectView, QuotaView
from holdfast_protocol.service import LONGEST_OVERLAP_SECONDS, CreateToken, RotateToken, TokenCreated, TokenView
from holdfast_protocol.states import QuotaKind, Scope
from holdfast_protocol.text import counted
from holdfast_protocol.usage import ProjectSample, RunSample, SampledEvery

projects = noun("projects")
tokens = noun("tokens")
sessions = noun("sessions")
whoami = typer.Typer(rich_markup_mode=None)
ui = typer.Typer(rich_markup_mode=None)


def show_deleted(found: Iterable[tuple[str, InTrash | None]]) -> None:
    """A table of projects or runs that can be taken back."""
    show_table(
        ["deleted", "at (UTC)", "by", "why", "until (UTC)"],
        (
            (name, as_time(each.deleted_at), each.deleted_by, each.reason or NOTHING, as_time(each.purge_at))
            for name, each in found
            if each is not None
        ),
        nothing="Nothing of that is in the trash: there is nothing to undelete.",
    )


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)

QUOTA_HELP = "Bytes in the store, such as 500GB or 2TiB, or `none`."

QuotaOption = Annotated[str | None, typer.Option(help=QUOTA_HELP)]
ObjectsOption = Annotated[str | None, typer.Option(help="Objects in the store, such as 5M, or `none`.")]
RunsOption = Annotated[str | None, typer.Option(help="Runs that are not in the trash, or `none`.")]
RowsOption = Annotated[str | None, typer.Option(help="Rows of the catalog, such as 20M, or `none`.")]
CheckpointsOption = Annotated[str | None, typer.Option(help="Checkpoints, such as 20k, or `none`.")]
SoftOption = Annotated[str | None, typer.Option(help="From here on the service tells, and refuses nothing; or `none`.")]


@projects.command("list")
def list_projects(
    *,
    deleted: DeletedOption = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """List the projects and what they hold."""
    with connect() as client:
        found = first(client.projects.all(deleted=deleted), limit)
    if json:
        show_json(found)
        return
    if deleted:
        show_deleted((one.name, one.in_trash) for one in found)
        return
    show_table(
        ["project", ">runs", ">logical", ">stored", ">deduplicated", ">quota", ">used"],
        (
            (
                one.name,
                str(one.runs),
                as_bytes(one.logical_bytes),
                as_bytes(one.stored_bytes),
                as_bytes(one.deduplicated_bytes),
                _quota(one),
                as_bytes(one.quota_used_bytes),
            )
            for one in found
        ),
        nothing="There are no projects yet. `holdfast projects create NAME` makes one.",
    )


@projects.command()
def show(project: ProjectArgument, json: JsonOption = False) -> None:
    """Show a project: its quota, and what it holds."""
    with connect() as client:
        _show(client.projects.get(project), json)


@projects.command()
def create(
    project: ProjectArgument,
    *,
    quota: QuotaOption = None,
    quota_objects: ObjectsOption = None,
    quota_runs: RunsOption = None,
    quota_checkpoints: CheckpointsOption = None,
    quota_rows: RowsOption = None,
    soft_quota: SoftOption = None,
    soft_quota_objects: SoftOption = None,
    soft_quota_runs: SoftOption = None,
    soft_quota_checkpoints: SoftOption = None,
    soft_quota_rows: SoftOption = None,
    json: JsonOption = False,
) -> None:
    """Make a project. One that is there keeps its quotas, unless others are given."""
    request = _quotas_given(
        quota_bytes=quota,
        quota_objects=quota_objects,
        quota_runs=quota_runs,
        quota_checkpoints=quota_checkpoints,
        quota_rows=quota_rows,
        soft_quota_bytes=soft_quota,
        soft_quota_objects=soft_quota_objects,
        soft_quota_runs=soft_quota_runs,
        soft_quota_checkpoints=soft_quota_checkpoints,
        soft_quota_rows=soft_quota_rows,
    )
    with connect() as client:
        try:
            view = client.projects.edit(project, request)
        except EditNeedsVersion:
            view = client.projects.edit(project, request, etag=client.projects.get(project).etag)
    _show(view, json)


@projects.command()
def edit(
    project: ProjectArgument,
    *,
    quota: QuotaOption = None,
    quota_objects: ObjectsOption = None,
    quota_runs: RunsOption = None,
    quota_checkpoints: CheckpointsOption = None,
    quota_rows: RowsOption = None,
    soft_quota: SoftOption = None,
    soft_quota_objects: SoftOption = None,
    soft_quota_runs: SoftOption = None,
    soft_quota_checkpoints: SoftOption = None,
    soft_quota_rows: SoftOption = None,
    json: JsonOption = False,
) -> None:
    """Change how much a project may have. Quotas that are not given stay."""
    request = _quotas_given(
        quota_bytes=quota,
        quota_objects=quota_objects,
        quota_runs=quota_runs,
        quota_checkpoints=quota_checkpoints,
        quota_rows=quota_rows,
        soft_quota_bytes=soft_quota,
        soft_quota_objects=soft_quota_objects,
        soft_quota_runs=soft_quota_runs,
        soft_quota_checkpoints=soft_quota_checkpoints,
        soft_quota_rows=soft_quota_rows,
    )
    if not request.model_fields_set:
        raise typer.BadParameter("Give a quota, such as --quota 500GB or --quota-runs 100.")
    with connect() as client:
        # A mistyped name must not make a project.
        view = client.projects.edit(project, request, etag=client.projects.get(project).etag)
    _show(view, json)


def _quotas_given(**quotas: str | None) -> EditProject:
    given = {name: text for name, text in quotas.items() if text is not None}
    return EditProject(
        **{name: read_size(text) if name.endswith("bytes") else read_count(text) for name, text in given.items()}
    )


def _show(view: ProjectView, json: bool) -> None:
    if json:
        show_json(view)
        return
    show_facts(
        [
            ("project", view.name),
            ("quota", _quota(view)),
            ("quota used", as_bytes(view.quota_used_bytes)),
            *((f"quota of {one.kind}", text) for one in view.quotas if (text := _other_quota(one)) is not None),
            ("runs", str(view.runs)),
            ("logical", as_bytes(view.logical_bytes)),
            ("stored", as_bytes(view.stored_bytes)),
            ("deduplicated", as_bytes(view.deduplicated_bytes)),
            ("created", f"{as_time(view.created_at)} UTC"),
        ]
    )


def _quota(project: ProjectView) -> str:
    return "none" if project.quota_bytes is None else as_bytes(project.quota_bytes)


def _other_quota(one: QuotaView) -> str | None:
    """None: there is none, or it is shown already."""
    shown: Callable[[int], str] = as_bytes if one.kind is QuotaKind.BYTES else str
    hard = None if one.kind is QuotaKind.BYTES or one.hard is None else f"at most {shown(one.hard)}"
    soft = None if one.soft is None else f"told from {shown(one.soft)} on"
    limits = [limit for limit in (hard, soft) if limit is not None]
    return f"{shown(one.used)} used, {', '.join(limits)}" if limits else None


EveryOption = Annotated[SampledEvery, typer.Option(help="A line for each hour, or for each day in UTC.")]


@projects.command()
def samples(
    project: ProjectArgument,
    *,
    every: EveryOption = SampledEvery.HOUR,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitedOption = 24,
    json: JsonOption = False,
) -> None:
    """Show bytes, cost and goodput of a project over time.

    The newest first. Bytes and cost are those of the end of the hour.
    """
    begins, ends = read_past(since), read_past(until)
    with connect() as client:
        found = first(client.insights.all_project_samples(project, every=every, since=begins, until=ends), limit)
    if json:
        show_json(found)
        return
    say_if_cut(found, limit)
    cells = (
        [
            str(one.live_runs),
            str(one.committed_checkpoints),
            as_bytes(one.logical_bytes),
            as_bytes(one.stored_bytes),
            f"{one.per_month:.2f} {one.currency}",
        ]
        for one in found
    )
    show_samples(every, found, [">live", ">saved", ">logical", ">stored", ">per month"], cells)


def show_samples(
    every: SampledEvery,
    found: Sequence[ProjectSample | RunSample],
    columns: list[str],
    cells: Iterable[list[str]],
) -> None:
    """A table of samples. `columns` and `cells`: what only projects or only runs have."""

    def lines() -> Iterator[list[str]]:
        for one, more in zip(found, cells, strict=True):
            begin = one.since.astimezone(UTC).strftime("%Y-%m-%d" if every is SampledEvery.DAY else "%Y-%m-%d %H:%M")
            share = NOTHING if one.goodput is None else f"{one.goodput:.1%}"
            age = one.restore_point_age_seconds
            yield [begin, share, NOTHING if age is None else f"{age / 3600:.1f} h", *more]
            if one.missed_hours:
                yield [f"({counted(one.missed_hours, 'hour')} missed)", "", "", *([""] * len(more))]

    show_table(
        [f"{every.value} (UTC)", ">goodput", ">restore point", *columns],
        lines(),
        nothing="There are no samples of that time. The service takes them after each hour, of a run while it is live.",
    )


def read_size(text: str) -> int | None:
    """`500GB`, `2 TiB`, `1048576` -> bytes; `none` -> None."""
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 500GB, 2TiB or none.")
    size = _in_ones(text, match)
    if 0 < size < 1:
        raise typer.BadParameter(f"{text!r} is less than one byte; name its unit, for example {match[1]}TiB.")
    return int(size)


def read_count(text: str) -> int | None:
    """`500`, `20k`, `1.5M` -> how many; `none` -> None."""
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or text.strip().lower().endswith("b"):
        raise typer.BadParameter(f"{text!r} is not a count; write for example 500, 20k, 5M or none.")
    count = _in_ones(text, match)
    if count % 1:
        raise typer.BadParameter(f"{text!r} is not whole; write for example 500, 20k, 5M or none.")
    return int(count)


def _in_ones(text: str, match: re.Match[str]) -> Fraction:
    ones = Fraction(match[1]) * _UNITS[match[2].lower()]
    if ones > LARGEST_INTEGER:
        raise typer.BadParameter(f"{text!r} is more than the service can count; write none for no limit.")
    return ones


ExpiresOption = Annotated[str, typer.Option(help="After this time, such as 12h, 90d or never.")]


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="The job or person that it is for.")],
    *,
    scope: Annotated[list[Scope], typer.Option(help="What it may do; give it several times. None implies another.")],
    project: Annotated[str | None, typer.Option(help="Only in this project; without it, in every one.")] = None,
    expires: ExpiresOption = "90d",
    requests_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="Its calls a second, at most; seals and heartbeats do not count.")
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=4, help="Its calls that may be under way, likewise.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a token. It is shown once and kept nowhere."""
    request = CreateToken(
        name=name,
        project=project,
        scopes=scope,
        expires_in_seconds=read_lifetime(expires),
        requests_per_second=requests_per_second,
        concurrent_requests=concurrent_requests,
    )
    with connect() as client:
        made = client.tokens.create(request)
    if json:
        show_json(made)
        return
    _show_made(made)


def _show_made(made: TokenCreated) -> None:
    show_line(made.token)
    show_note(f"Token {made.id} ({_scopes(made)}), until {as_time(made.expires_at)}. It is not shown again.")


@tokens.command()
def rotate(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `holdfast tokens list` shows it.")],
    *,
    overlap: Annotated[str, typer.Option(help="So long the one before stays good, such as 24h.")] = "24h",
    expires: ExpiresOption = "90d",
    json: JsonOption = False,
) -> None:
    """Replace a token by one like it, and have it end after a while.

    Meanwhile give the new one to the job or person that has the old one.
    """
    overlap_seconds = read_duration(overlap)
    if not 60 <= overlap_seconds <= LONGEST_OVERLAP_SECONDS:
        raise typer.BadParameter("The token before ends: give a time from a minute to 90 days, such as 24h.")
    request = RotateToken(overlap_seconds=overlap_seconds, expires_in_seconds=read_lifetime(expires))
    with connect() as client:
        made = client.tokens.rotate(token_id, request)
    if json:
        show_json(made)
        return
    _show_made(made)
    show_note(f"It replaces {made.replaced.id}, which is good until {as_time(made.replaced.expires_at)}.")


@tokens.command("list")
def list_tokens(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List the tokens, revoked ones too."""
    with connect() as client:
        found = first(client.tokens.all(), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "name", "project", "scopes", ">calls/s", "used (UTC)", "ends (UTC)"],
        (
            (
                one.id,
                one.name,
                one.project or "(all)",
                _scopes(one),
                NOTHING if one.requests_per_second is None else f"{one.requests_per_second:g}",
                as_time(one.last_used_at),
                "revoked" if one.revoked_at else as_time(one.expires_at) if one.expires_at else NOTHING,
            )
            for one in found
        ),
        nothing="There are no tokens. `holdfast tokens create NAME --scope SCOPE` makes one.",
    )


@tokens.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `holdfast tokens list` shows it.")],
    json: JsonOption = False,
) -> None:
    """Revoke a token, at once and for good."""
    with connect() as client:
        view = client.tokens.revoke(token_id)
    if json:
        show_json(view)
    else:
        show_line(f"{view.id} ({view.name}) is revoked.")


@sessions.command("list")
def list_sessions(*, limit: LimitOption = None, json: JsonOption = False) -> None:
    """List who has signed in to the web page, the newest first.

    Of your own token; with the scope operate or admin, of all of them.
    """
    with connect() as client:
        found = first(client.sessions.all(), limit)
    if json:
        show_json(found)
        return
    show_table(
        ["id", "token", "name", "project", "since (UTC)", "ends (UTC)"],
        (
            (
                one.id,
                one.token_id,
                one.name,
                one.project or "(all)",
                as_time(one.created_at),
                as_time(one.expires_at),
            )
            for one in found
        ),
        nothing="Nobody has signed in to the web page now, or nobody that this token may know of.",
    )


@sessions.command("revoke")
def revoke_session(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="As `holdfast sessions list` shows it.")],
    json: JsonOption = False,
) -> None:
    """End a session of the web page, at once.

    Its token stays good: `holdfast tokens revoke` ends that, and all of its sessions.
    """
    with connect() as client:
        view = client.sessions.revoke(session_id)
    if json:
        show_json(view)
    elif view is None:
        show_line(f"{session_id} is not open any more: a first try ended it, and its reply was lost.")
    else:
        show_line(f"{view.id} (of {view.name}) has ended. Its token {view.token_id} is still good.")


def _scopes(token: TokenView) -> str:
    return " ".join(scope.value for scope in token.scopes)


@whoami.command("whoami")
def show_caller(json: JsonOption = False) -> None:
    """Show whose token this is, and what it may do."""
    with connect() as client:
        url, info = client.settings.url, client.service.info()
    if json:
        show_json(info)
        return
    show_facts(
        (
            ("token", f"{info.token_name} ({info.token_id or NOTHING})"),
            ("project", info.token_project or "(all)"),
            ("scopes", " ".join(scope.value for scope in info.token_scopes)),
            ("ends (UTC)", as_time(info.token_expires_at)),
            ("service", f"{url}, version {info.version}"),
        )
    )
    if (ending := end_of_token(info)) is not None:
        show_note(ending)


_PAGE = "/ui/"


@ui.command("ui")
def open_page(
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; else print the link.")
    ] = True,
) -> None:
    """Open the web page in a browser, signed in with this client's token.

    The link works once, within a minute. Without a screen it is printed.
    """
    with connect() as client:
        page = f"{client.settings.url}{_PAGE}"
        client.service.info()  # raises what is wrong with the way there, or with the token
        if not client.transport.reachable(_PAGE):
            raise HoldfastError(
                f"The service answers, but has no web page at {page}. If it runs from a clone, run scripts/prepare-web "
                "there; if it was installed as a package, it is older than this client: upgrade it."
            )
        # Behind a #, which a browser sends to no server: the code is in no log, and the token not even there.
        link = f"{page}#code={client.tokens.sign_in_code().code}"
    if browser and has_screen() and webbrowser.open(link):
        show_line(f"Opened {page} in your browser.")
        return
    show_line(link)
    show_note("It signs in once, within a minute.")


def has_screen() -> bool:
    """Else a browser for terminals would take this terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
