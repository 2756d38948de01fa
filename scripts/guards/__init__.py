"""The guards of docs/rules.md, by the sections of that page. `make prove` takes them out, one at a time."""

from __future__ import annotations

from scripts.guards import attempts_and_commits, limits, operations, reading_and_collection, sessions, training

GUARDS = (
    *attempts_and_commits.GUARDS,
    *reading_and_collection.GUARDS,
    *operations.GUARDS,
    *limits.GUARDS,
    *sessions.GUARDS,
    *training.GUARDS,
)
