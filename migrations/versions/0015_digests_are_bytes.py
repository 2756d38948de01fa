"""Digests and generations as bytes

Revision: 0015. They were hex text, twice as long. See `Hex` in `db/dialect.py`.

Each table is written anew, once, with its indexes: two minutes on Postgres for 10^6 checkpoints with 1.8 x 10^6 chunks.
Nothing reads or writes a table meanwhile.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

COLUMNS = {
    "tokens": ("secret_sha256",),
    "checkpoints": ("digest",),
    "chunk_lists": ("digest", "entries_digest"),
    "shards": ("digest",),
    "chunks": ("digest",),
    "copies": ("generation", "stored_digest"),
    "found_encodings": ("digest", "stored_digest"),
    "operations": ("fingerprint",),
    "idempotency_keys": ("asked",),
}


def upgrade() -> None:
    _alter("BYTEA", "decode({0}, 'hex')", sa.LargeBinary(), bytes.fromhex)


def downgrade() -> None:
    _alter("TEXT", "encode({0}, 'hex')", sa.Text(), bytes.hex)


def _alter(postgres_type, converted, type_, convert) -> None:
    bind = op.get_bind()
    if bind.dialect.name == "postgresql":
        for table, columns in COLUMNS.items():
            each = ", ".join(
                f"ALTER COLUMN {column} TYPE {postgres_type} USING {converted.format(column)}" for column in columns
            )
            op.execute(f"ALTER TABLE {table} {each}")
            # The planner's statistics of an altered column are gone, and no row has changed that would bring them back.
            op.execute(f"ANALYZE {table}")
        return
    # The copy casts text to the bytes of its letters, or such bytes to text; then each value is converted in its place.
    bind.connection.dbapi_connection.create_function(
        "converted", 1, lambda value: None if value is None else convert(value), deterministic=True
    )
    letters = sa.Text() if isinstance(type_, sa.LargeBinary) else sa.LargeBinary()
    for table, columns in COLUMNS.items():
        with op.batch_alter_table(table) as batch:
            for column in columns:
                batch.alter_column(column, type_=type_)
        rows = sa.table(table, *(sa.column(column) for column in columns))
        op.execute(sa.update(rows).values({each: sa.func.converted(sa.cast(each, letters)) for each in rows.c}))
