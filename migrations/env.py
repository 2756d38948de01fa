"""Alembic's entry: runs the revisions over the connection that `holdfast_service.db.migrate` hands in.

Called from a shell (`alembic revision --autogenerate -m "…"`, `alembic check`) there is none: then the database of
HOLDFAST_DATABASE_URL is used, as by `holdfast serve`.
"""

from alembic import context
from sqlalchemy import Connection

from holdfast_service.dashboards.views import create_views, drop_views
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import exclusive_connection, pending_revision
from holdfast_service.db.tables import Table
from holdfast_service.db.triggers import create_triggers, drop_triggers, settle_triggers
from holdfast_service.settings import ServiceSettings


def run(connection: Connection) -> None:
    online = bool(context.config.attributes.get("online"))
    # As a batch, because SQLite alters a table by copying it.
    context.configure(
        connection=connection,
        target_metadata=Table.metadata,
        render_as_batch=True,
        transaction_per_migration=online,
    )
    if online:
        run_beside_saves(connection)
        return
    with context.begin_transaction():
        if not changes_tables():
            context.run_migrations()
            return
        drop_views(connection)
        drop_triggers(connection)
        context.run_migrations()
        create_triggers(connection)
        # They read what the newest revision has. A catalog that was taken back gets them again with the upgrade.
        if pending_revision(connection) is None:
            create_views(connection)


def run_beside_saves(connection: Connection) -> None:
    """On Postgres: each part is a short transaction, and all of it can be done again (see `db/migrate.py`)."""
    connection.rollback()
    with connection.begin():
        drop_views(connection)  # a column that a view shows cannot be altered
    with context.begin_transaction():
        context.run_migrations()
    connection.commit()  # with nothing left to migrate, what was read is still a transaction
    for settle in settle_triggers():
        with connection.begin():
            settle(connection)
    with connection.begin():
        create_views(connection)


def changes_tables() -> bool:
    """Not for `current`, `check`, or an upgrade to where the catalog is."""
    try:
        destination = context.get_revision_argument()
    except KeyError:
        return False  # the command has none
    return destination != context.get_context().get_current_revision()


handed_in = context.config.attributes.get("connection")
if handed_in is not None:
    run(handed_in)
else:
    with exclusive_connection(Database(ServiceSettings().database_url_text)) as opened:
        run(opened)
