"""A catalog from the bucket alone (rules fencing-token and record-outbox).

    begin -> projects, runs and checkpoints from their records -> copies from the stores' listings -> finish

sources.py      which stores are read, whose they are, and what another catalog has written
remembered.py   what the database that is replaced knows and no record says
begin.py        takes an empty database: whose catalog it is, in a higher epoch, and which stores there are
subjects.py     projects, policies, runs, attempts
checkpoint_rows.py  checkpoints, shards, holds, chunk lists and chunks
inventory.py    copies, by what the stores really hold
finish.py       what is missing is marked, and the catalog may be served
run.py          all of it, in order
endpoints.py    what could not be known, and the person's word that ends the doubt
report.py       what came of it, for people and programs
cli.py          `holdfast catalog rebuild`

Each step may be cut off and done again: what is there already is left as it is, and no service opens the catalog before
the last one.
"""
