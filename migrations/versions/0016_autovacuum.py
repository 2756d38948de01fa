"""Autovacuum for each kind of table

Revision: 0016. On Postgres only; docs/scale.md has the arithmetic.

The defaults wait for a fifth of a table: at 10^9 rows that is one vacuum in 2 x 10^8 changes, hours long, and
statistics as old. For a queue they are as wrong the other way: a fifth of what is left of it once it is empty.
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# They only grow, and most of their rows change once or never. One per cent, and at a pace that ends: index pages are
# read for it only if more than two per cent of the table's pages have dead rows. Inserts count too, because a scan of
# an index alone needs to know that a page is visible to all.
GROWING = {
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 10000,
    "autovacuum_vacuum_insert_scale_factor": 0.01,
    "autovacuum_vacuum_insert_threshold": 100000,
    "autovacuum_analyze_scale_factor": 0.01,
    "autovacuum_analyze_threshold": 10000,
    "autovacuum_vacuum_cost_limit": 2000,
}
# Their rows never change: they are frozen at the first vacuum, and never written again for it.
WRITTEN_ONCE = GROWING | {"autovacuum_freeze_min_age": 0}
# Each row is soon deleted, so the table's size says nothing about the work: a fixed number of dead rows does. It is
# done without a pause, because every reader of the queue passes over the dead rows until then.
QUEUE = {
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 5000,
    "autovacuum_analyze_scale_factor": 0,
    "autovacuum_analyze_threshold": 5000,
    "autovacuum_vacuum_cost_delay": 0,
}
# Few rows, each updated again and again: a heartbeat, a lease, a version.
BUSY = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 500,
    "autovacuum_analyze_scale_factor": 0.05,
    "autovacuum_analyze_threshold": 500,
    "autovacuum_vacuum_cost_delay": 0,
}

TABLES = {
    "checkpoints": GROWING,
    "shards": GROWING,
    "chunks": GROWING,
    "copies": GROWING,
    "written_records": GROWING,
    "checkpoint_copies": GROWING,
    "chunk_lists": WRITTEN_ONCE,
    "chunk_list_entries": WRITTEN_ONCE,
    "audit_events": WRITTEN_ONCE,
    "shard_chunks": QUEUE,
    "read_leases": QUEUE,
    "collect_candidates": QUEUE,
    "webhook_deliveries": QUEUE,
    "idempotency_keys": QUEUE,
    "checkpoint_deltas": QUEUE,
    "byte_deltas": QUEUE,
    "recount_marks": QUEUE,
    "projects": BUSY,
    "runs": BUSY,
    "attempts": BUSY,
    "record_subjects": BUSY,
    "retention_marks": BUSY,
    "operations": BUSY,
    "controllers": BUSY,
    "workers": BUSY,
    "history_marks": BUSY,
    "store_maintenance": BUSY,
    "checkpoint_tallies": BUSY,
    "byte_tallies": BUSY,
}


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table, settings in TABLES.items():
            each = ", ".join(f"{name} = {value}" for name, value in settings.items())
            op.execute(f"ALTER TABLE {table} SET ({each})")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table, settings in TABLES.items():
            op.execute(f"ALTER TABLE {table} RESET ({', '.join(settings)})")
