"""`holdfast admin dashboard-role`: what its role sees, as a client of Postgres that has its password."""

from __future__ import annotations

import math
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psycopg
import pytest
from alembic import command
from scripts import write_dashboards
from sqlalchemy import inspect, make_url, select, text

from holdfast_service.dashboards.role import EVERY, DashboardRoleError, put_role, remove_role
from holdfast_service.dashboards.views import all_views, create_views, drop_views, ensure_views
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import alembic_config, exclusive_connection, revisions
from holdfast_service.db.tables import Table
from holdfast_service.db.tables.operations import AuditEvent, DashboardGrant
from tests.support.dashboards import sample_now
from tests.support.postgres import OwnPostgresServer, PostgresServer
from tests.support.random_catalogs import fill
from tests.support.rank import Job
from tests.support.serve import run_holdfast
from tests.support.service import RunningService

pytestmark = pytest.mark.parametrize("database_url", ["postgres"], indirect=True)


@pytest.fixture
def name(postgres: PostgresServer) -> Iterator[str]:
    """A role that is not there, neither before nor after."""
    name = f"dash_{secrets.token_hex(4)}"
    yield name
    with psycopg.connect(_dsn(postgres.url_for("postgres")), autocommit=True) as connection:
        databases = connection.execute("SELECT datname FROM pg_database WHERE datallowconn").fetchall()
    for (database,) in databases:
        with psycopg.connect(_dsn(postgres.url_for(str(database))), autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,)).fetchone() is not None:
                connection.execute(f"DROP OWNED BY {name}")
    with psycopg.connect(_dsn(postgres.url_for("postgres")), autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {name}")


@pytest.fixture
def filled(service: RunningService) -> RunningService:
    """Two projects. A role of the first must see nothing of the second."""
    for run in ("demo/gpt", "hidden/secret-run"):
        job = Job(service.http(), run, create=True)
        job.save(100)
        job.heartbeat(100, metrics={"loss": [[100, 1.0]]})
        sample_now(service)
        job.end("finished")
    service.http().get("/v1/events").raise_for_status()  # numbers them
    return service


def _dsn(url: str, **changes: str) -> str:
    return make_url(url).set(drivername="postgresql", **changes).render_as_string(hide_password=False)


@contextmanager
def logged_in(
    service: RunningService, name: str, password: str | None = None
) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    url = str(service.context.database.url.render_as_string(hide_password=False))
    changes = {"username": name} | ({} if password is None else {"password": password})
    with psycopg.connect(_dsn(url, **changes), autocommit=True) as connection:
        yield connection


def projects(connection: psycopg.Connection[tuple[object, ...]], subject: str) -> set[object]:
    return {row[0] for row in connection.execute(f"SELECT project FROM dashboard_v1_{subject}").fetchall()}


def refused(connection: psycopg.Connection[tuple[object, ...]], statement: str) -> bool:
    try:
        connection.execute(statement)  # type: ignore[call-overload]
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectNotInPrerequisiteState):
        return True  # it has no right, or it is a view that nobody can write
    return False


def test_the_role_sees_the_views_and_no_table(filled: RunningService, name: str) -> None:
    made = put_role(filled.context.database, name)
    assert (made.is_new, list(made.projects)) == (True, [EVERY])
    with logged_in(filled, name) as connection:
        for view in all_views():
            assert connection.execute(f"SELECT * FROM {view.name}").description is not None
            assert projects(connection, view.subject) == {"demo", "hidden"}, view.subject
        connection.execute("SET default_transaction_read_only = off")  # a limit, and no lock
        for table in Table.metadata.tables:
            assert refused(connection, f"SELECT * FROM {table}"), table
            assert refused(connection, f"DELETE FROM {table}"), table
        for view in all_views():
            assert refused(connection, f"DELETE FROM {view.name}"), view.name
        assert refused(connection, "CREATE TABLE mine (a int)")
        assert refused(connection, "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        assert refused(connection, "SELECT pg_read_file('PG_VERSION')")
        assert refused(connection, "COPY dashboard_v1_runs TO PROGRAM 'cat'")
        assert refused(connection, "SET ROLE postgres")
        assert refused(connection, f"ALTER ROLE {name} CREATEROLE")


def test_a_role_of_one_project_sees_no_row_of_another(filled: RunningService, name: str) -> None:
    put_role(filled.context.database, name, projects=["demo"])
    with logged_in(filled, name) as connection:
        for view in all_views():
            assert projects(connection, view.subject) == {"demo"}, view.subject
        # A function that tells what it is asked about, and says that it costs nothing: the planner would ask it first.
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(
            "CREATE FUNCTION pg_temp.told(value text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS "
            "$$BEGIN RAISE NOTICE '%', value; RETURN true; END$$"
        )
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        for subject in ("projects", "runs", "checkpoints", "restore_points", "usage_by_day", "events", "curve_points"):
            connection.execute(f"SELECT * FROM dashboard_v1_{subject} WHERE pg_temp.told(project)")
        assert set(told) == {"demo"}
        # Its own tables, which stand before the catalog's in the order of names.
        connection.execute("CREATE TEMP TABLE projects (id text)")
        connection.execute(
            "CREATE TEMP TABLE dashboard_grants AS SELECT current_user::text AS role_name, '' AS project_id"
        )
        assert projects(connection, "runs") == {"demo"}
        # An error that a row of another project would raise.
        connection.execute("SELECT 1 / (length(project) - 6) FROM dashboard_v1_runs")
    # The service's own role sees everything.
    with logged_in(filled, str(filled.context.database.url.username)) as connection:
        assert projects(connection, "runs") == {"demo", "hidden"}


def test_without_the_barrier_a_function_would_be_told(filled: RunningService, name: str) -> None:
    """So the test above could find it."""
    put_role(filled.context.database, name, projects=["demo"])
    with filled.context.database.transaction() as session:
        session.execute(text("ALTER VIEW dashboard_v1_projects SET (security_barrier = false)"))
    try:
        with logged_in(filled, name) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(
                "CREATE FUNCTION pg_temp.told(value text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS "
                "$$BEGIN RAISE NOTICE '%', value; RETURN true; END$$"
            )
            told: list[str] = []
            connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
            connection.execute("SELECT * FROM dashboard_v1_projects WHERE pg_temp.told(project)")
    finally:
        with filled.context.database.transaction() as session:
            session.execute(text("ALTER VIEW dashboard_v1_projects SET (security_barrier = true)"))
    assert set(told) == {"demo", "hidden"}


def test_the_same_again_changes_what_is_asked_for_alone(filled: RunningService, name: str) -> None:
    database = filled.context.database
    first = put_role(database, name, projects=["demo"])
    again = put_role(database, name)
    assert first.password
    assert (again.is_new, again.password, list(again.projects)) == (False, None, ["demo"])
    assert list(put_role(database, name, projects=["hidden", "demo"]).projects) == ["demo", "hidden"]
    assert list(put_role(database, name, every_project=True).projects) == [EVERY]
    with logged_in(filled, name) as connection:
        assert projects(connection, "runs") == {"demo", "hidden"}
    with pytest.raises(DashboardRoleError, match="no project 'nothing'"):
        put_role(database, name, projects=["nothing"])
    assert list(put_role(database, name).projects) == [EVERY]
    remove_role(database, name)
    with pytest.raises(psycopg.OperationalError, match="does not exist"), logged_in(filled, name):
        pass
    with pytest.raises(DashboardRoleError, match="has made no role"):
        remove_role(database, name)
    with database.read() as session:
        told = session.scalars(select(AuditEvent).where(AuditEvent.action.like("dashboard_role.%")))
        assert [(event.action, (event.after or {}).get("projects")) for event in told] == [
            ("dashboard_role.put", ["demo"]),
            ("dashboard_role.put", ["demo", "hidden"]),
            ("dashboard_role.put", [EVERY]),
            ("dashboard_role.delete", None),
        ]
        assert first.password not in str(session.execute(text("SELECT * FROM audit_events")).all())


def test_an_upgrade_leaves_the_role_what_it_sees(filled: RunningService, name: str) -> None:
    put_role(filled.context.database, name, projects=["demo"])
    with filled.context.database.engine.begin() as connection:
        drop_views(connection)
        create_views(connection)
    with logged_in(filled, name) as connection:
        assert projects(connection, "runs") == {"demo"}
        assert refused(connection, "SELECT * FROM runs")


def test_a_catalog_from_a_dump_knows_what_its_roles_saw(filled: RunningService, name: str) -> None:
    """Roles are the server's, and no dump of a database has them."""
    put_role(filled.context.database, name, projects=["demo"])
    with filled.context.database.engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {name}")
        connection.exec_driver_sql(f"DROP ROLE {name}")
        drop_views(connection)
        create_views(connection)
    made = put_role(filled.context.database, name)
    assert (made.is_new, list(made.projects)) == (True, ["demo"])
    with logged_in(filled, name) as connection:
        assert projects(connection, "runs") == {"demo"}


def test_a_role_that_would_see_more_is_not_made(filled: RunningService, name: str) -> None:
    database = filled.context.database
    with pytest.raises(DashboardRoleError, match="not made for this catalog"):
        put_role(database, "postgres" if database.url.username != "postgres" else str(database.url.username))
    for wrong in ('a"; DROP ROLE postgres; --', "Dash", "pg_reader", "public", "none", "", "a" * 64):
        with pytest.raises(DashboardRoleError, match="no name for a role"):
            put_role(database, wrong)
    with pytest.raises(DashboardRoleError, match="too short"):
        put_role(database, name, password="secret")
    for statement, back, told in (
        ("GRANT SELECT ON tokens TO PUBLIC", "REVOKE ALL ON tokens FROM PUBLIC", "tokens"),
        ("GRANT SELECT (name) ON tokens TO PUBLIC", "REVOKE ALL (name) ON tokens FROM PUBLIC", "tokens"),
        ("GRANT CREATE ON SCHEMA public TO PUBLIC", "REVOKE CREATE ON SCHEMA public FROM PUBLIC", "can make tables"),
        ("CREATE TABLE theirs (a int); GRANT SELECT ON theirs TO PUBLIC", "DROP TABLE theirs", "can use theirs"),
        (
            "CREATE MATERIALIZED VIEW old AS SELECT * FROM runs; GRANT SELECT ON old TO PUBLIC",
            "DROP MATERIALIZED VIEW old",
            "can use old",
        ),
        (
            "CREATE SCHEMA bi; CREATE VIEW bi.jobs AS SELECT * FROM runs; GRANT USAGE ON SCHEMA bi TO PUBLIC; "
            "GRANT SELECT ON bi.jobs TO PUBLIC",
            "DROP SCHEMA bi CASCADE",
            r"can use bi\.jobs",
        ),
        (
            "CREATE SEQUENCE counter; GRANT USAGE ON SEQUENCE counter TO PUBLIC",
            "DROP SEQUENCE counter",
            "can use counter",
        ),
    ):
        with database.transaction() as session:
            session.execute(text(statement))
        try:
            with pytest.raises(DashboardRoleError, match=told):
                put_role(database, name)
        finally:
            with database.transaction() as session:
                session.execute(text(back))
    with database.read() as session:
        assert session.execute(text("SELECT 1 FROM pg_roles WHERE rolname = :name"), {"name": name}).all() == []


@pytest.mark.parametrize("attribute", ["REPLICATION", "CREATEROLE", "CREATEDB", "BYPASSRLS"])
def test_a_role_that_was_given_more_is_refused(filled: RunningService, name: str, attribute: str) -> None:
    database = filled.context.database
    put_role(database, name, projects=["demo"])
    with database.transaction() as session:
        session.execute(text(f"ALTER ROLE {name} {attribute}"))
    with pytest.raises(DashboardRoleError, match=attribute):
        put_role(database, name, every_project=True)
    with logged_in(filled, name) as connection:
        assert projects(connection, "runs") == {"demo"}, "nothing was changed"
    assert remove_role(database, name)


def test_a_role_that_may_make_schemas_is_refused(filled: RunningService, name: str) -> None:
    database = filled.context.database
    put_role(database, name)
    with database.transaction() as session:
        session.execute(text(f"GRANT CREATE ON DATABASE {database.url.database} TO {name}"))
    with pytest.raises(DashboardRoleError, match="can make schemas"):
        put_role(database, name)


def test_a_role_that_people_have_made_is_left_alone(filled: RunningService, name: str) -> None:
    """A grant's row came with a dump, and this server has a role of that name for something else."""
    database = filled.context.database
    with database.transaction() as session:
        session.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'of-its-own'"))
        session.add(DashboardGrant(role_name=name, project_id=""))

    def role() -> object:
        with database.read() as session:
            return session.execute(text("SELECT * FROM pg_authid WHERE rolname = :name"), {"name": name}).one()

    before = role()
    for refused_call in (put_role, remove_role):
        with pytest.raises(DashboardRoleError, match="not made for this catalog"):
            refused_call(database, name)
    with pytest.raises(DashboardRoleError, match="not made for this catalog"):
        put_role(database, name, password="a-long-password", every_project=True)
    with database.transaction() as session:
        session.execute(text(f"COMMENT ON ROLE {name} IS 'Holdfast dashboards of catalog of-another'"))
    with pytest.raises(DashboardRoleError, match="not made for this catalog"):
        remove_role(database, name)
    with database.engine.begin() as opened:
        drop_views(opened)
        create_views(opened)
    assert role() == before
    with logged_in(filled, name) as connection:
        for view in all_views():
            assert refused(connection, f"SELECT * FROM {view.name}"), view.name


def test_a_role_that_is_a_member_of_another_is_not_dropped(filled: RunningService, name: str) -> None:
    database = filled.context.database
    put_role(database, name)
    with database.transaction() as session:
        session.execute(text(f"GRANT pg_monitor TO {name}"))
    with pytest.raises(DashboardRoleError, match="member of another role"):
        put_role(database, name)
    assert not remove_role(database, name)
    with logged_in(filled, name) as connection:
        assert projects(connection, "runs") == set(), "the catalog shows it nothing"


def test_a_role_whose_grants_were_lost_is_told_nothing_unasked(filled: RunningService, name: str) -> None:
    database = filled.context.database
    put_role(database, name, projects=["demo"])
    with database.transaction() as session:
        session.execute(text("DELETE FROM dashboard_grants"))
    with pytest.raises(DashboardRoleError, match="--every-project"):
        put_role(database, name)
    assert list(put_role(database, name, projects=["hidden"]).projects) == ["hidden"]


def test_a_database_that_is_closed_to_everybody_is_opened_to_the_role(filled: RunningService, name: str) -> None:
    database = filled.context.database
    closed = f"DATABASE {database.url.database}"
    with database.transaction() as session:
        session.execute(text(f"REVOKE CONNECT ON {closed} FROM PUBLIC"))
        session.execute(text("REVOKE USAGE ON SCHEMA public FROM PUBLIC"))
    try:
        put_role(database, name)
        with logged_in(filled, name) as connection:
            assert projects(connection, "runs") == {"demo", "hidden"}
        remove_role(database, name)
    finally:
        with database.transaction() as session:
            session.execute(text(f"GRANT CONNECT ON {closed} TO PUBLIC"))
            session.execute(text("GRANT USAGE ON SCHEMA public TO PUBLIC"))


def test_the_settings_of_a_role_are_the_operators(filled: RunningService, name: str) -> None:
    database = filled.context.database
    put_role(database, name)
    with logged_in(filled, name) as connection:
        assert connection.execute(
            "SELECT current_setting('timezone'), current_setting('statement_timeout')"
        ).fetchall() == [("UTC", "1min")]
    with database.transaction() as session:
        session.execute(text(f"ALTER ROLE {name} CONNECTION LIMIT 3"))
        session.execute(text(f"ALTER ROLE {name} SET statement_timeout = '5min'"))
    put_role(database, name, projects=["demo"], new_password=True)
    with logged_in(filled, name) as connection:
        assert connection.execute("SELECT current_setting('statement_timeout')").fetchone() == ("5min",)
        assert connection.execute("SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user").fetchone() == (3,)


def test_the_url_has_nothing_else_of_the_services(filled: RunningService, name: str) -> None:
    url = filled.context.database.url
    secretive = url.update_query_dict(
        {
            "user": str(url.username),
            "password": "service-password",
            "options": "-c search_path=public",
            "sslmode": "prefer",
        }
    )
    database = Database(secretive.render_as_string(hide_password=False))
    try:
        told = make_url(put_role(database, name).url)
    finally:
        database.dispose()
    assert (told.username, told.password, told.host, told.port) == (name, None, url.host, url.port)
    assert (told.database, dict(told.query)) == (url.database, {"sslmode": "prefer"})


def test_the_password_that_is_told_opens_and_no_other_does(
    filled: RunningService, name: str, postgres: PostgresServer
) -> None:
    if not isinstance(postgres, OwnPostgresServer):
        # Who may log in to a server that people use is theirs to say; one that the tests start is always tried.
        pytest.skip("it writes the server's pg_hba.conf: that of TEST_DATABASE_URL is not ours")
    with passwords_asked_of(postgres, name):
        made = put_role(filled.context.database, name)
        assert made.password is not None
        with logged_in(filled, name, made.password) as connection:
            assert connection.execute("SELECT current_user").fetchone() == (name,)
        given = "given-by-a-person-'\"\\"
        assert put_role(filled.context.database, name, password=given).password == given
        with logged_in(filled, name, given) as connection:
            assert connection.execute("SELECT current_user").fetchone() == (name,)
        another = put_role(filled.context.database, name, new_password=True).password
        for wrong in (made.password, given):
            with pytest.raises(psycopg.OperationalError, match="password"), logged_in(filled, name, wrong):
                pass
        with logged_in(filled, name, another):
            pass


@contextmanager
def passwords_asked_of(server: PostgresServer, name: str) -> Iterator[None]:
    """The tests' server trusts everybody otherwise."""
    with psycopg.connect(_dsn(server.url_for("postgres")), autocommit=True) as connection:
        (path,) = connection.execute("SHOW hba_file").fetchone() or ("",)
        lines = [
            str(line).rstrip("\r\n")
            for (line,) in connection.execute("SELECT unnest(string_to_array(pg_read_file(%s), E'\\n'))", (path,))
        ]

        def write(rules: list[str]) -> None:
            values = ", ".join(psycopg.sql.quote(rule) for rule in rules)
            connection.execute(f"COPY (SELECT unnest(ARRAY[{values}])) TO {psycopg.sql.quote(path)}")
            connection.execute("SELECT pg_reload_conf()")

        write([f"host all {name} 127.0.0.1/32 scram-sha-256", *lines])
        try:
            yield
        finally:
            write(lines)


def test_the_command_tells_how_to_connect(filled: RunningService, name: str) -> None:
    url = filled.context.database.url.render_as_string(hide_password=False)
    environment = {"HOLDFAST_DATABASE_URL": url}
    made = run_holdfast("admin", "dashboard-role", name, "--project", "demo", **environment)
    assert made.returncode == 0, made.stderr
    assert "was made" in made.stdout
    told = re.search(r"psql '(postgresql://\S+)'\n +password +(\S+) ", made.stdout)
    assert told is not None
    assert name in told[1]
    assert len(told[2]) >= 20
    again = run_holdfast("admin", "dashboard-role", name, "--password-stdin", typed="a-long-password\n", **environment)
    assert again.returncode == 0, again.stderr
    assert "is up to date" in again.stdout
    assert "password" not in again.stdout + again.stderr
    gone = run_holdfast("admin", "dashboard-role", name, "--remove", **environment)
    assert (gone.returncode, gone.stdout) == (0, f"The role {name} is gone.\n")
    wrong = run_holdfast("admin", "dashboard-role", name, "--remove", **environment)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("holdfast: ")


def test_a_user_that_may_make_no_role_is_told(filled: RunningService, name: str) -> None:
    database = filled.context.database
    plain = f"plain_{secrets.token_hex(4)}"
    with database.transaction() as session:
        session.execute(text(f"CREATE ROLE {plain} LOGIN"))
        session.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {plain}"))
    other = Database(database.url.set(username=plain).render_as_string(hide_password=False))
    try:
        with pytest.raises(DashboardRoleError, match="CREATEROLE"):
            put_role(other, name)
        with database.transaction() as session:
            session.execute(text(f"ALTER ROLE {plain} CREATEROLE"))
        with pytest.raises(DashboardRoleError, match="would lack SELECT on dashboard_v1_attempt"):
            put_role(other, name)  # it can read the views and not grant them, of which the server only warns
    finally:
        other.dispose()
        with database.transaction() as session:
            session.execute(text(f"DROP OWNED BY {plain}"))
            session.execute(text(f"DROP ROLE {plain}"))


def test_the_command_makes_no_catalog_and_brings_none_up_to_date(database_url: str, name: str) -> None:
    database = Database(database_url)
    try:
        with exclusive_connection(database) as connection:
            command.downgrade(alembic_config(connection), "-1")
            older = revisions(connection)[0]
            tables = inspect(connection).get_table_names()
        for arguments in ((), ("--remove",)):
            told = run_holdfast("admin", "dashboard-role", name, *arguments, HOLDFAST_DATABASE_URL=database_url)
            assert told.returncode == 1
            assert f"is at revision {older}" in told.stderr
            assert "Start the service" in told.stderr.replace("\n", " ")
        with database.engine.connect() as opened:
            assert (revisions(opened)[0], inspect(opened).get_table_names()) == (older, tables)
            assert inspect(opened).get_view_names() == []
            assert opened.scalar(text("SELECT count(*) FROM pg_roles WHERE rolname = :name"), {"name": name}) == 0
    finally:
        with exclusive_connection(database) as connection:
            command.upgrade(alembic_config(connection), "head")
        database.dispose()


@pytest.mark.usefixtures("database_url")
def test_an_empty_database_stays_empty(postgres: PostgresServer, name: str) -> None:
    url = postgres.create_database(f"empty_{name}")
    try:
        told = run_holdfast("admin", "dashboard-role", name, HOLDFAST_DATABASE_URL=url)
        assert told.returncode == 1
        assert told.stderr.startswith("holdfast: There is no catalog in this database.")
        database = Database(url)
        with database.engine.connect() as opened:
            assert inspect(opened).get_table_names() == []
            assert opened.scalar(text("SELECT count(*) FROM pg_roles WHERE rolname = :name"), {"name": name}) == 0
        database.dispose()
    finally:
        postgres.drop_database(f"empty_{name}")


def test_a_catalog_that_lacks_a_view_says_what_to_do(filled: RunningService, name: str) -> None:
    database = filled.context.database
    with database.transaction() as session:
        session.execute(text("DROP VIEW dashboard_v1_runs"))
    try:
        with pytest.raises(DashboardRoleError, match=r"lacks the view dashboard_v1_runs\. Start the service"):
            put_role(database, name)
    finally:
        ensure_views(database)
    put_role(database, name)
    with logged_in(filled, name) as connection:
        assert projects(connection, "runs") == {"demo", "hidden"}


def test_two_at_once_are_told(filled: RunningService, name: str) -> None:
    """The second waits for the first one's row in the server's roles, and finds it there."""
    database = filled.context.database
    raised: list[Exception] = []

    def make() -> None:
        try:
            put_role(database, name)
        except DashboardRoleError as error:
            raised.append(error)

    with logged_in(filled, str(database.url.username)) as first:
        with first.transaction():
            first.execute(f"CREATE ROLE {name}")
            second = threading.Thread(target=make)
            second.start()
            while first.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is None:
                assert second.is_alive()
        second.join()
    assert "Try again" in str(raised[0])


GUIDE = Path(__file__).resolve().parents[3] / "docs" / "operating" / "dashboards.md"
QUERIES = re.findall(r"^```sql\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_guides_queries_find_something_for_the_role(service: RunningService, name: str) -> None:
    with service.context.database.transaction() as session:
        fill(session, runs=40, seed=5)
    sample_now(service)
    put_role(service.context.database, name, projects=["random-1"])
    assert len(QUERIES) == 7
    with logged_in(service, name) as connection:
        for query in QUERIES:
            found = connection.execute(query)
            assert found.fetchall(), query
            with pytest.raises(psycopg.errors.UndefinedColumn):  # so a column of another name would be seen
                connection.execute(re.sub(r"\brun(_id)?\b|\bday\b|\bhour\b", "renamed", query))


PANELS = {
    panel["title"]: panel["sql"]
    for dashboard in write_dashboards.definitions()
    for panel in write_dashboards.panels_of(dashboard)
    if "sql" in panel
}


@pytest.mark.parametrize("title", PANELS)
def test_grafanas_panels_find_something_for_the_role(service: RunningService, name: str, title: str) -> None:
    with service.context.database.transaction() as session:
        fill(session, runs=40, seed=5)
    sample_now(service)
    put_role(service.context.database, name, projects=["random-1"])
    whole = re.sub(r"\$__timeFilter\(([^)]+)\)", r"\1 BETWEEN now() - interval '10 years' AND now()", PANELS[title])
    assert whole != PANELS[title]
    with logged_in(service, name) as connection:
        for chosen in (".*", r"random\-1", r"(other|random\-1)"):
            found = connection.execute(whole.replace("${project:regex}", chosen))  # type: ignore[call-overload]
            assert [column.name for column in found.description or ()] == ["time", "metric", "value"]
            rows = found.fetchall()
            assert any(isinstance(value, float) and math.isfinite(value) for _, _, value in rows), chosen
            assert {metric for _, metric, _ in rows} == {"random-1"}
            assert {type(moment) for moment, _, _ in rows} == {datetime}
        other = connection.execute(whole.replace("${project:regex}", "other"))  # type: ignore[call-overload]
        assert other.fetchall() == []
        renamed = re.sub(r"\b(uploaded|stored)_bytes\b", "renamed", whole)
        with pytest.raises(psycopg.errors.UndefinedColumn):
            connection.execute(renamed.replace("${project:regex}", ".*"))  # type: ignore[call-overload]
