"""The catalog's database.

engine.py           engine and transactions; what a process remembers of acknowledged changes; whether the database
                    went back. postgres.py: how long it waits for Postgres
dialect.py          what SQLite and Postgres say differently: column types, the clock, the insert of what may be there
lease.py            the lease on a row: one process works on it
tables/             the tables; migrate.py brings them up to date
pages.py            cursors; repeats.py: calls that may be sent twice; place.py: is this a clone of the catalog?
"""
