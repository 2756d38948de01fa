"""Which commands there are: by subject, each with its line in `holdfast --help` and the module that brings it.

The help is written from this table alone. A module is imported when one of its commands runs, so that a prompt or a
script does not wait for forty modules that it does not need.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """`module` is below `holdfast_client.cli`; or `plugin` is an entry point that another package brings."""

    name: str
    help: str
    module: str = ""
    plugin: str = ""


SUBJECTS: dict[str, tuple[Entry, ...]] = {
    "Start here": (
        Entry("serve", "Run the service; without options for this machine.", plugin="serve"),
        Entry("doctor", "Check the way to the service and its store.", "doctor.command"),
    ),
    "Runs": (
        Entry("runs", "List runs, how they fare, and their restore points.", "runs"),
        Entry("attempts", "List the launches of a run, and why each ended.", "attempts"),
        Entry("restore-point", "Tell what a relaunch would resume from, and why.", "restore_point"),
        Entry("goodput", "Show where a run's time and steps went.", "goodput"),
        Entry("advise", "Say how often a run should save, and why.", "advice"),
    ),
    "Training jobs": (
        Entry("run", "Start a job; the exit code says how it ended.", "run.command"),
        Entry("spool", "Saves on this machine's disk that are not committed.", "spool.command"),
        Entry("verify-resume", "Does this script resume exactly?", plugin="verify-resume"),
    ),
    "Checkpoints": (
        Entry("checkpoints", "List the checkpoints of a run.", "checkpoints"),
        Entry("show", "Show one checkpoint, whatever its state.", "checkpoints"),
        Entry("pull", "Fetch, verify, and write files for other tools.", plugin="pull"),
        Entry("health", "Quarantine a checkpoint, or release it.", "health"),
        Entry("pin", "Keep a checkpoint from policies and from prune.", "trash"),
        Entry("unpin", "Take a pin away.", "trash"),
        Entry("hold", "Keep a checkpoint from everybody.", "holds"),
    ),
    "What stays, and what goes": (
        Entry("retention", "What stays of a run and why: plan, apply, policies.", "retention"),
        Entry("prune", "Delete one checkpoint, or those that fit conditions.", "trash"),
        Entry("delete", "Delete a whole run, or a project with its runs.", "deleting"),
        Entry("trash", "What was deleted and can be taken back.", "trash"),
        Entry("collect", "Delete what nothing needs any more, now.", "collection"),
        Entry("sweep", "Find objects in a store that no row knows.", "collection"),
        Entry("policy", "Policies of every kind: show, put, delete.", "policies"),
    ),
    "Proof and copies": (
        Entry("scrub", "Read stored bytes again, and repair what is bad.", "scrub"),
        Entry("bad-copies", "List the copies that are bad or suspect.", "scrub"),
        Entry("impact", "Tell what a bad chunk means, and for whom.", "scrub"),
        Entry("copies", "Tell how far the second store is behind.", "copies"),
        Entry("drill", "Restore from one store alone, to prove it.", "copies"),
    ),
    "Where the bytes are, and what they cost": (
        Entry("usage", "Show what checkpoints take up, figure by figure.", "usage"),
        Entry("cost", "Show what storing costs a month.", "usage"),
        Entry("prices", "The prices that costs are counted with.", "usage"),
        Entry("tiers", "What gets cold when.", "tiers"),
        Entry("thaw", "Make a cold checkpoint readable for some days.", "tiers"),
    ),
    "Operating the service": (
        Entry("project", "Projects and their quotas.", "projects"),
        Entry("token", "Tokens: create, list, revoke.", "tokens"),
        Entry("webhook", "Have a URL called when something happens.", "webhooks"),
        Entry("events", "Who changed what, and why.", "events"),
        Entry("operations", "Long work that somebody started.", "operations"),
        Entry("controllers", "Background work: what is due, its lag, its errors.", "controllers"),
        Entry("worker", "Do background work, beside a service on Postgres.", plugin="serve"),
        Entry("workers", "List the processes that serve or do background work.", "controllers"),
        Entry("store", "The stores, and whose they are.", "stores"),
        Entry("catalog", "Compare the catalog with its stores, or rebuild it.", "catalog"),
        Entry("admin", "Work on the catalog's database itself.", plugin="serve"),
    ),
}

ENTRIES = {entry.name: entry for entries in SUBJECTS.values() for entry in entries}
