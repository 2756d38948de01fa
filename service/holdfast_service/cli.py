"""The service's commands: `serve`, `workers run`, `catalog rebuild`, and `admin …`, which works on the database.

The client's CLI finds them as a plug-in (see pyproject.toml) and never imports the service.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from sqlalchemy import make_url, select

from holdfast_protocol.base import Name
from holdfast_protocol.states import Scope
from holdfast_protocol.text import without_secrets
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.logging import configure_logging
from holdfast_service.release import VERSION
from holdfast_service.settings import ServiceSettings, SettingsError, refuse_unknown_settings, settings_table
from holdfast_service.stores.base import StoreError

_FAILED, _USAGE, _UNAVAILABLE = 1, 2, 5  # as holdfast_client.cli.output says

Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder for catalog, store and token.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="sqlite:///path or postgresql://… One with a password belongs into HOLDFAST_DATABASE_URL: other users of "
        "the machine see a command line."
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="posix:///path, s3://bucket/prefix?endpoint=…, gs://bucket/prefix or az://container/prefix?account=…",
    ),
]


def register(app: typer.Typer) -> None:
    """Each is found by the entry point of its name: `serve`, `workers.run`, `admin.create-token`, …"""
    app.command("serve", help="Run the service. Without options: for this machine, in ~/.holdfast.")(serve_command)
    app.command("run", help="Do background work for a service on Postgres, in any number.")(worker_command)
    app.command("create-token", help="Make a token without asking the service: the first one.")(create_token_command)
    app.command("raise-epoch", help="After a restore or clone: trust nothing from before.")(raise_epoch_command)
    app.command("confirm-move", help="The database was moved here, and the old one is gone.")(confirm_move_command)
    app.command("dashboard-role", help="A database role that sees the views for dashboards alone.")(
        dashboard_role_command
    )
    app.command("rotate-secrets", help="Encrypt the catalog's secrets with the first key.")(rotate_secrets_command)
    app.command("migrate", help="Bring the catalog up to date, while services run.")(migrate_command)
    app.command("backup", help="Write the catalog into one file, while services run.")(backup_command)
    app.command("restore", help="Make a catalog of a backup, in a database that is empty.")(restore_command)
    app.command("rebuild", help="Get the catalog back from a store alone, into an empty database.")(rebuild_command)


def serve_command(  # noqa: PLR0917 (typer calls it by keyword)
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    store: StoreUrl = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that answer requests; more than one needs Postgres.")
    ] = None,
    print_settings: Annotated[bool, typer.Option("--print-settings", help="Show every setting and end.")] = False,
) -> None:
    if print_settings:
        _print_settings()
        return
    with _failures_said():
        settings = _settings(
            host=host, port=port, data_dir=data_dir, database_url=database_url, store=store, serve_workers=workers
        )
        # Only now: the other commands need neither uvicorn nor the application.
        from holdfast_service.serve import serve

        serve(settings, _say_where)


def worker_command(database_url: DatabaseUrl = None, store: StoreUrl = None) -> None:
    with _failures_said():
        settings = _settings(database_url=database_url, store=store)
        from holdfast_service.worker import work

        work(settings, _say_who)


def create_token_command(  # noqa: PLR0917 (typer calls it by keyword)
    name: Annotated[str, typer.Option(help="What it is for.")] = "bootstrap",
    scope: Annotated[list[Scope] | None, typer.Option(help="May be repeated; without it: every scope.")] = None,
    project: Annotated[str | None, typer.Option(help="Only for this project; it is made if need be.")] = None,
    days: Annotated[int | None, typer.Option(min=1, help="Ends after so many days; without it: never.")] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.audit.record import Actor, record_event
    from holdfast_service.auth.principal import new_token_text
    from holdfast_service.auth.tokens import insert_token, token_facts
    from holdfast_service.db.dialect import database_now
    from holdfast_service.runs.views import ensure_project
    from holdfast_service.service import open_database

    if project is not None:
        try:
            TypeAdapter(Name).validate_python(project)
        except ValidationError:
            # Also of a variable that is not set: a token without a project is good for all of them.
            raise typer.BadParameter(
                f"{project!r} is no project's name, which has letters, digits, `.`, `_` and `-`, at most 100."
            ) from None
    with _failures_said():
        database = open_database(_settings(data_dir=data_dir, database_url=database_url))
        text = new_token_text()
        try:
            with database.transaction() as session:
                actor = Actor.at_the_database()
                project_id = None if project is None else ensure_project(session, project, actor).id
                expires_at = database_now(session) + timedelta(days=days) if days else None
                made = insert_token(
                    session, text, name=name, scopes=scope or Scope, project_id=project_id, expires_at=expires_at
                )
                record_event(session, actor, "token.create", project_id=project_id, after=token_facts(made))
        finally:
            database.dispose()
    sys.stdout.write(f"{text}\n")


def raise_epoch_command(
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Of a clone for tests: what it lacks of the original is given up.")
    ] = False,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.attached_stores.epoch import raise_epoch
    from holdfast_service.audit.record import Actor
    from holdfast_service.service import open_database

    with _failures_said():
        database = open_database(_settings_of_catalog(data_dir=data_dir, database_url=database_url))
        try:
            epoch = raise_epoch(database, Actor.at_the_database(), accept_loss=accept_loss)
        finally:
            database.dispose()
    sys.stdout.write(
        f"The catalog is at epoch {epoch}. Start the service again: it reads every copy anew, and changes nothing in "
        "the stores until `holdfast catalog check` and `holdfast stores claim`.\n"
    )


def rebuild_command(  # noqa: PLR0917 (typer calls it by keyword)
    source: Annotated[str, typer.Option("--from", metavar="STORE_URL", help="The store whose records are read.")],
    catalog: Annotated[
        str | None, typer.Option(metavar="ID", help="Whose records to take, where the store's marker is lost or wrong.")
    ] = None,
    older_database: Annotated[
        str | None,
        typer.Option(
            "--with-database",
            metavar="URL",
            help="The database that is replaced, if it is still there: what it knows and no record says comes along.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.rebuild.cli import rebuild_catalog
    from holdfast_service.rebuild.sources import RebuildRefusedError
    from holdfast_service.records.documents import NewerRecordError

    with _failures_said():
        try:
            report = rebuild_catalog(
                _settings(data_dir=data_dir, database_url=database_url),
                source,
                catalog_id=catalog,
                older_url=older_database,
                dry_run=dry_run,
                json=json,
            )
        except (RebuildRefusedError, NewerRecordError) as error:
            _fail(str(error), _FAILED)
    if not report.whole:
        raise typer.Exit(_FAILED)


def confirm_move_command(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    from holdfast_service.attached_stores.epoch import confirm_move
    from holdfast_service.audit.record import Actor
    from holdfast_service.service import open_database

    with _failures_said():
        database = open_database(_settings_of_catalog(data_dir=data_dir, database_url=database_url))
        try:
            confirm_move(database, Actor.at_the_database())
        finally:
            database.dispose()
    sys.stdout.write("The catalog lives here from now on. Make sure that the old database is never served again.\n")


def rotate_secrets_command(
    lost_key: Annotated[
        bool,
        typer.Option(
            "--lost-key",
            help="Give up what a key that is lost has encrypted: a new signing key, and those webhooks are deleted.",
        ),
    ] = False,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.audit.record import Actor
    from holdfast_service.secrets.kept import give_up_lost, rotate
    from holdfast_service.secrets.keyring import keyring_of
    from holdfast_service.service import open_database
    from holdfast_service.stores.posix.signed_urls import new_signing_key

    with _failures_said():
        settings = _settings_of_catalog(data_dir=data_dir, database_url=database_url)
        keyring = keyring_of(settings)
        database = open_database(settings)
        try:
            if lost_key:
                given_up = give_up_lost(database, keyring, new_signing_key(), Actor.at_the_database())
                new_key = "A new signing key was drawn: start every service again. " if given_up.signing_key else ""
                sys.stdout.write(f"{new_key}{given_up.webhooks} webhooks were deleted; make them anew.\n")
                return
            count = rotate(database, keyring, Actor.at_the_database())
        finally:
            database.dispose()
    assert keyring.current is not None
    sys.stdout.write(
        f"Every secret is encrypted with the key {keyring.current.id}; {count} rows were not before. Older keys can be "
        "taken away where services have them.\n"
    )


def migrate_command(
    check: Annotated[
        bool, typer.Option("--check", help="Only say what would be done; exit code 1 if there is something to do.")
    ] = False,
    wait_seconds: Annotated[
        float | None, typer.Option(min=0, help="How long to try, where other transactions keep locks; else 10 minutes.")
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.dashboards.views import ensure_views
    from holdfast_service.db.migrate import (
        WAIT_SECONDS,
        CatalogTooNewError,
        MigrationBlockedError,
        pending_steps,
        upgrade,
    )
    from holdfast_service.service import open_as_it_is

    with _failures_said():
        database = open_as_it_is(_settings(data_dir=data_dir, database_url=database_url))
        try:
            if check:
                steps = pending_steps(database)
            else:
                steps = upgrade(database, wait_seconds=WAIT_SECONDS if wait_seconds is None else wait_seconds)
                ensure_views(database)
        except (CatalogTooNewError, MigrationBlockedError) as error:
            _fail(str(error), _FAILED)
        finally:
            database.dispose()
    for step in steps:
        sys.stdout.write(f"{'to do' if check else 'done'}  {step.revision}  {step.title}\n")
    if not steps:
        sys.stdout.write("The catalog is up to date; there is nothing to do.\n")
    elif check:
        raise typer.Exit(_FAILED)


def backup_command(
    file: Annotated[Path, typer.Argument(help="The file; it must not be there yet.")],
    plain_secrets: Annotated[
        bool,
        typer.Option("--plain-secrets", help="Keep the secrets of webhooks, though the catalog has them unencrypted."),
    ] = False,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.backup.document import BackupRefusedError
    from holdfast_service.backup.write import write_backup
    from holdfast_service.service import open_as_it_is

    with _failures_said():
        database = open_as_it_is(_settings_of_catalog(data_dir=data_dir, database_url=database_url))
        try:
            made = write_backup(database, file, plain_secrets=plain_secrets)
        except BackupRefusedError as error:
            _fail(str(error), _FAILED)
        finally:
            database.dispose()
    sys.stdout.write(f"{file}: the catalog {made.catalog_id} of {made.made_at}, at epoch {made.epoch}.\n")


def restore_command(
    file: Annotated[Path, typer.Argument(help="What `holdfast admin backup` wrote.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.backup.document import BackupRefusedError
    from holdfast_service.backup.restore import restore_backup

    with _failures_said():
        try:
            epoch = restore_backup(_settings(data_dir=data_dir, database_url=database_url), file)
        except BackupRefusedError as error:
            _fail(str(error), _FAILED)
    sys.stdout.write(
        f"The catalog of {file} is there, at epoch {epoch}. Start the service: it reads every copy anew, and changes "
        "nothing in the stores until `holdfast catalog check` and `holdfast stores claim`. The check names what was "
        "committed after the backup; `holdfast catalog rebuild` brings it back.\n"
    )


def dashboard_role_command(  # noqa: PLR0917 (typer calls it by keyword)
    name: Annotated[str, typer.Argument(help="The role's name in Postgres.")],
    project: Annotated[
        list[str] | None,
        typer.Option(help="The role sees this project; may be repeated. A new one without it sees all."),
    ] = None,
    every_project: Annotated[
        bool, typer.Option("--every-project", help="The role sees every project, those to come too.")
    ] = False,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read its password from stdin; a terminal is asked for it.")
    ] = False,
    new_password: Annotated[
        bool, typer.Option("--new-password", help="Make up another password for a role that is there.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take the role away.")] = False,
    database_url: DatabaseUrl = None,
) -> None:
    from holdfast_service.dashboards.role import EVERY, NEEDS_POSTGRES, DashboardRoleError, put_role, remove_role
    from holdfast_service.service import open_as_it_is

    if (every_project and project) or (remove and (every_project or project or password_stdin or new_password)):
        _fail("These options do not go together. See `holdfast admin dashboard-role --help`.", _USAGE)
    with _failures_said():
        settings = _settings(database_url=database_url)
        if not settings.database_url_text.startswith("postgres"):
            _fail(NEEDS_POSTGRES, _FAILED)
        database = open_as_it_is(settings)
        try:
            if remove:
                gone = remove_role(database, name)
                sys.stdout.write(
                    f"The role {name} is gone.\n"
                    if gone
                    else f"The role {name} sees nothing of the catalog any more. It is a superuser or a member of "
                    f"another role, so it was not dropped: `DROP ROLE {name}` if nobody needs it.\n"
                )
                return
            role = put_role(
                database,
                name,
                projects=project or (),
                every_project=every_project,
                password=_password() if password_stdin else None,
                new_password=new_password,
            )
        except DashboardRoleError as error:
            _fail(str(error), _FAILED)
        finally:
            database.dispose()
    lines = [
        f"The role {name} {'was made' if role.is_new else 'is up to date'}. It sees the views for dashboards of "
        + ("every project." if list(role.projects) == [EVERY] else f"{', '.join(role.projects)}."),
        f"  connect   psql '{role.url}'",
    ]
    if role.password is not None and not password_stdin:
        lines.append(f"  password  {role.password} (shown this once)")
    sys.stdout.write("\n".join(lines) + "\n")


def _password() -> str:
    """The first line of stdin; from a terminal without showing it."""
    return getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")


def _settings(**given: Any) -> ServiceSettings:
    refuse_unknown_settings()
    settings = ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    configure_logging(settings)  # what a command logs goes to stderr: its output is for programs
    return settings


def _settings_of_catalog(**given: Any) -> ServiceSettings:
    """For a command on a catalog that is there: in a shell without the service's environment it would make a new one.
    Raises SettingsError and ProblemError(`database_unavailable`)."""
    from holdfast_service.db.migrate import revisions
    from holdfast_service.db.tables.core import CatalogIdentity
    from holdfast_service.service import open_as_it_is

    settings = _settings(**given)
    url = make_url(settings.database_url_text)
    there = url.get_backend_name() != "sqlite" or Path(str(url.database)).is_file()  # to open it would make it
    if there:
        database = open_as_it_is(settings)
        try:
            with database.read() as session:
                migrated = revisions(session.connection())[0] is not None
                there = migrated and session.scalar(select(CatalogIdentity.catalog_id)) is not None
        finally:
            database.dispose()
    if not there:
        raise SettingsError(
            "There is no catalog in this database, or it was never served. Correct HOLDFAST_DATABASE_URL or --data-dir."
        )
    return settings


def _say_where(context: ServiceContext, url: str) -> None:
    from holdfast_service.work.processes import weaknesses_of

    settings = context.settings
    lines = [
        f"Holdfast {VERSION} listens on {url}",
        f"  catalog  {context.database.url.render_as_string(hide_password=True)}",
        f"  store    {without_secrets(settings.store_url)}",
    ]
    if settings.embedded:
        lines.append(f"  token    {settings.token_file} (clients on this machine find it by themselves)")
    elif settings.bootstrap_token is not None:
        lines.append("  token    the one in HOLDFAST_BOOTSTRAP_TOKEN")
    else:
        lines.append("  token    make the first one with `holdfast admin create-token`")
    lines += [f"  warning  {told}" for told in weaknesses_of(context)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _say_who(context: ServiceContext) -> None:
    sys.stdout.write(
        f"Holdfast {VERSION} works as {context.process_id}\n"
        f"  catalog  {context.database.url.render_as_string(hide_password=True)}\n"
        f"  store    {without_secrets(context.settings.store_url)}\n"
    )
    sys.stdout.flush()


def _print_settings() -> None:
    table = Table("setting", "default", "what it is", show_lines=True)
    for setting, default, description in settings_table():
        table.add_row(setting, default, description)
    Console().print(table)


@contextmanager
def _failures_said() -> Iterator[None]:
    """Every failure of a start is one or two plain sentences and an exit code."""
    from holdfast_service.serve import PortInUseError

    try:
        yield
    except SettingsError as error:
        _fail(str(error), _USAGE)
    except PortInUseError as error:
        _fail(str(error), _FAILED)
    except ProblemError as error:
        _fail(error.detail, _UNAVAILABLE)
    except StoreError as error:
        _fail(f"The store does not answer: {error}", _UNAVAILABLE)


def _fail(text: str, code: int) -> None:
    sys.stderr.write(f"holdfast: {without_secrets(text)}\n")
    raise typer.Exit(code) from None
