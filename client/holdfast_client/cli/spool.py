"""Saves that are in no training job any more. `holdfast spool list | push | drop`: those on this machine's disk that
are not known to be committed. `holdfast agent serve | status`: the process that finishes those of killed ranks."""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from holdfast_client.agent.copies import Copies
from holdfast_client.agent.link import status_of
from holdfast_client.agent.memory_tier import MemoryTier
from holdfast_client.agent.process import socket_path
from holdfast_client.agent.server import Agent
from holdfast_client.agent.shared_memory import default_limit_bytes
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.chunks.peers import address_towards
from holdfast_client.cli.arguments import (
    DryRunOption,
    JsonOption,
    LimitOption,
    YesOption,
    connect,
    exit_unless_meant,
    first,
    read_run,
)
from holdfast_client.cli.main import noun
from holdfast_client.cli.output import NOTHING, ExitCode, as_bytes, as_time, show_facts, show_json, show_table
from holdfast_client.cli.projects import read_size
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.errors import ConfigurationError
from holdfast_client.local.push import Outcome, SavePusher
from holdfast_client.local.spool import BadRecord, Spooled, SpooledSave, saves_of
from holdfast_client.local.tier import LocalTier
from holdfast_client.settings import ClientSettings

spool = noun("spool")
agent = noun("agent")


class Shown(BaseModel):
    """One save, as far as this folder holds it; `--json` prints it."""

    project: str
    run: str
    attempt: int
    step: int
    world_size: int
    ranks: list[int]
    bytes: int
    created_at: datetime
    committed: bool = False
    outcome: str = "spooled"

    @classmethod
    def of(cls, save: SpooledSave, outcome: Outcome | None = None) -> Shown:
        shown = cls(
            project=save.key.project,
            run=save.key.run,
            attempt=save.key.attempt,
            step=save.key.step,
            world_size=save.key.world_size,
            ranks=[record.rank for record in save.records],
            bytes=sum(record.chunk_bytes for record in save.records),
            created_at=save.records[0].created_at,
        )
        if outcome is None:
            return shown
        return shown.model_copy(update={"committed": outcome.committed, "outcome": outcome.told})


class ShownBad(BaseModel):
    """A record that cannot be read."""

    name: str
    problem: str


def shown_saves(saves: Iterable[SpooledSave], bad: Iterable[BadRecord]) -> list[BaseModel]:
    return [*(Shown.of(save) for save in saves), *(ShownBad(name=one.name, problem=one.problem) for one in bad)]


FolderOption = Annotated[
    Path | None, typer.Option("--dir", metavar="FOLDER", help="The local tier; without it HOLDFAST_LOCAL_DIR.")
]
OnlyRun = Annotated[str | None, typer.Argument(metavar="[PROJECT/RUN]", help="Only of this run; without it of all.")]
OnlyStep = Annotated[int | None, typer.Option("--step", min=0, help="Only of this step.")]


@spool.command("list")
def list_saves(
    run: OnlyRun = None, *, folder: FolderOption = None, limit: LimitOption = None, json: JsonOption = False
) -> None:
    """List what the folder holds. Asks no service."""
    with _opened(folder) as tier:
        spooled = tier.spool.read()
        found = first(_chosen(spooled, run, None), limit)
    if json:
        show_json(shown_saves(found, spooled.bad))
        return
    show_table(
        ["run", ">step", ">attempt", "ranks here", ">size", "saved (UTC)"],
        (
            (
                str(save.key.run_name),
                str(save.key.step),
                str(save.key.attempt),
                _ranks(save),
                as_bytes(sum(record.chunk_bytes for record in save.records)),
                as_time(save.records[0].created_at),
            )
            for save in found
        ),
        nothing=f"The spool of {tier.path} is empty: every save on this machine is committed.",
    )
    _tell_bad(spooled)


@spool.command()
def push(
    run: OnlyRun = None,
    *,
    step: OnlyStep = None,
    folder: FolderOption = None,
    detached: Annotated[
        bool,
        typer.Option(
            "--detached",
            help="Also commit saves that the run has gone on without: kept beside the lineage, never the latest.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Commit saves, the oldest first. Run it on each machine that holds some of a save's ranks."""
    with _opened(folder) as tier, connect() as client:
        spooled = tier.spool.read()
        found = _chosen(spooled, run, step)
        pusher = SavePusher(client, tier, allow_detached=detached)
        results = [Shown.of(save, pusher.push(save)) for save in found]
    if json:
        show_json(results)
    else:
        for result in results:
            show_line(f"{result.project}/{result.run} step {result.step}: {result.outcome}")
        if not results:
            show_note(f"The spool of {tier.path} holds no such saves. `holdfast spool list` shows what it holds.")
        _tell_bad(spooled)
    if spooled.bad or not all(result.committed for result in results):
        raise typer.Exit(ExitCode.FAILED)


@spool.command()
def drop(
    run: OnlyRun = None,
    *,
    step: OnlyStep = None,
    folder: FolderOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Give saves up for good, unreadable ones too. They may be the only copies."""
    with _opened(folder) as tier:
        spooled = tier.spool.read()
        found = _chosen(spooled, run, step)
        bad = spooled.bad if run is None and step is None else ()
        done = yes and not dry_run
        if done:
            for name in [record.name for save in found for record in save.records] + [one.name for one in bad]:
                tier.spool.forget(name)
    if json:
        show_json(shown_saves(found, bad))
    else:
        what = "dropped" if done else "would be dropped"
        for save in found:
            show_line(f"{save.key.run_name} step {save.key.step}, rank {_ranks(save)}: {what}")
        for one in bad:
            show_line(f"{one.name}: {what}")
    if found or bad:
        exit_unless_meant("dropped, and it cannot be undone", yes=yes, dry_run=dry_run)


@contextmanager
def _opened(folder: Path | None) -> Iterator[LocalTier]:
    settings = ClientSettings()
    path = folder or settings.local_dir
    if path is None:
        raise ConfigurationError("No local folder is named. Say --dir FOLDER, or set HOLDFAST_LOCAL_DIR.")
    if not path.expanduser().is_dir():
        raise ConfigurationError(f"There is no folder {path}. Name the one that the training job was given.")
    tier = LocalTier(path, settings.local_bytes)
    try:
        yield tier
    finally:
        tier.close()


def _chosen(spooled: Spooled, run: str | None, step: int | None) -> list[SpooledSave]:
    name = None if run is None else read_run(run)
    return [
        save
        for save in saves_of(spooled.records)
        if (name is None or save.key.run_name == name) and (step is None or save.key.step == step)
    ]


def _ranks(save: SpooledSave) -> str:
    here = [record.rank for record in save.records]
    if len(here) == save.key.world_size:
        return f"all {len(here)}"
    return f"{', '.join(map(str, here)) or NOTHING} of {save.key.world_size}"


def _tell_bad(spooled: Spooled) -> None:
    for one in spooled.bad:
        show_note(f"holdfast: {one.name} cannot be pushed: {one.problem}.")


SocketOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The socket; without it HOLDFAST_AGENT, else /tmp/holdfast-UID/agent.sock. Its folder is made with mode "
        "0700, and must be this user's alone.",
    ),
]


@agent.command("serve")
def serve_agent(
    *,
    socket: SocketOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The most staging memory that all ranks of this node may share with it, such as 200GiB. Without it: "
            "half of the node's memory. Over it, a rank saves without the agent.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="STATES",
            help="States of each run that stay in memory for a relaunch while the next one is staged: each costs the "
            "ranks their staging memory once more. Without it HOLDFAST_AGENT_KEEP, else 1. With 0 a state stays "
            "until the next one is staged.",
        ),
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="HOSTS",
            help="The agents of so many other hosts of a job get a copy of each state, in memory. Without it "
            "HOLDFAST_AGENT_PEERS, else 0: no copies, and no port is opened.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="After SIGTERM: how long it may take to finish what ranks have handed over."
        ),
    ] = 25.0,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where Prometheus finds /metrics, such as 127.0.0.1:9464. Needs the package prometheus-client.",
        ),
    ] = None,
    of_launch: Annotated[bool, typer.Option("--of-launch", hidden=True)] = False,
) -> None:
    """Finish saves of killed jobs on this node, and keep their states.

    It serves the jobs of this user, and keeps the last states of each run in memory.

    The jobs need the same path as HOLDFAST_AGENT, or as `agent=` of the Checkpointer. On SIGTERM living jobs go on
    without the agent. Exit code 1: saves of killed ranks could not be finished within the grace. One that is about to
    end at this socket is waited for, at most the grace.
    """
    limit = default_limit_bytes() if memory is None else read_size(memory)
    if limit is None:
        raise typer.BadParameter("say how much, such as 200GiB.")
    logging.basicConfig(format="%(asctime)s holdfast agent: %(message)s", level=logging.INFO)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    settings = ClientSettings()
    keeps = settings.agent_keep if keep is None else keep
    copies = _copies(settings.agent_peers if peers is None else peers, settings)
    if of_launch:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.OK))  # it may stand by until its launch ends
    path = socket_path(socket)
    serving = Agent(path, limit, keeps=keeps, wait_seconds=grace, of_launch=of_launch, copies=copies)
    if metrics is not None:
        _serve_metrics(metrics, serving)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: serving.end())
    if serving.serve(grace_seconds=grace):
        raise typer.Exit(ExitCode.FAILED)


def _copies(count: int, settings: ClientSettings) -> Callable[[MemoryTier, PeerAddress | None], Copies] | None:
    if not count:
        return None
    return functools.partial(
        Copies,
        count=count,
        host=settings.agent_address or address_towards(None),
        bytes_per_second=settings.agent_peer_bytes_per_second,
    )


def _serve_metrics(address: str, serving: Agent) -> None:
    try:
        from holdfast_client.agent.metrics import serve_metrics
    except ImportError as error:
        raise ConfigurationError(f"--metrics needs a package that is not here ({error}). Install it.") from error
    serve_metrics(address, serving.status)


@agent.command("status")
def show_agent(*, socket: SocketOption = None, json: JsonOption = False) -> None:
    """Show what the agent of this node holds, and what it has done."""
    status = status_of(socket_path(socket))
    if json:
        show_json(status)
        return
    counts = status.counts
    error = NOTHING if counts.last_error is None else f"{as_time(counts.last_error_at)} {counts.last_error}"
    show_facts(
        [
            ("agent", f"holdfast {status.holdfast}, process {status.pid}, since {as_time(status.started_at)}"),
            ("memory", f"{as_bytes(status.memory_bytes)} of {as_bytes(status.memory_limit_bytes)}"),
            ("ranks", str(status.ranks)),
            ("kept in memory", as_bytes(sum(state.bytes for state in status.kept))),
            ("parts", f"{len(status.held)} held, {counts.taken} taken"),
            ("of dead ranks", f"{counts.finished} committed, {counts.given_up} given up"),
            ("tries", f"{counts.tries}, {counts.failed_tries} failed"),
            ("last error", error),
        ]
    )
    show_table(
        ["run", ">step", ">attempt", ">rank", ">size", "state", "rank is", ">tries", "last error"],
        (
            (
                f"{part.project}/{part.run}",
                str(part.step),
                str(part.attempt),
                str(part.rank),
                as_bytes(part.bytes),
                part.state,
                "alive" if part.rank_lives else "dead",
                str(part.tries),
                part.last_error or NOTHING,
            )
            for part in status.held
        ),
        nothing="It holds no save.",
    )
    show_table(
        ["kept state of", ">step", ">attempt", ">size", ">parts", "copy of"],
        (
            (
                f"{state.project}/{state.run}",
                str(state.step),
                str(state.attempt),
                as_bytes(state.bytes),
                f"{state.parts} of {state.host_ranks}",
                NOTHING
                if state.copy_of is None
                else f"the host of rank {state.copy_of}{'' if state.is_committed else ', not committed'}",
            )
            for state in status.kept
        ),
        nothing="It keeps no state.",
    )
