"""The parts of a Checkpointer, and how they are put together. Each part's own file says what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.distributed.ranks import Ranks
from holdfast.distributed.step_agreement import StepAgreement
from holdfast.health.diverged import HealthJudge, HealthRule
from holdfast.health.rollback import Rollback
from holdfast.layout.plan import ChunkSizes
from holdfast.local.adoption import Adoption
from holdfast.local.keep import open_on_nodes
from holdfast.preemption.emergency import EmergencySave
from holdfast.preemption.standby_snapshot import StandbySnapshot, check_stage_every
from holdfast.preemption.watch import PreemptionWatch
from holdfast.progress import ProgressBoard
from holdfast.restore.checkpoint_reader import HostSharing
from holdfast.restore.restorer import Restorer
from holdfast.restore.streamed_rest import RestGate
from holdfast.save.job import SaveStats
from holdfast.save.pipeline import SavePipeline
from holdfast.save.saver import Completeness, Saver, window_bytes
from holdfast.schedule.save_policy import Policy, policy_of
from holdfast.schedule.schedule import Schedule, known_best
from holdfast.session.config import read_config
from holdfast.session.session import OutcomeFile, Session
from holdfast.settings import TrainerSettings
from holdfast.state.components import Declarations
from holdfast.verify.following import follow
from holdfast_client.agent.link import NodeAgent
from holdfast_client.agent.messages import Caller, PeerHere
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.host_calls import HostCalls
from holdfast_client.local.tier import LocalTier
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.states import AttemptOutcome

if TYPE_CHECKING:
    from holdfast.verify.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a Checkpointer, shared with restoring and with saves by the loop's own DCP. Tests and integrations
    reach a part by `Checkpointer.parts`; scripts have no need of it."""

    strict: bool
    check_finite: bool | None
    stats: SaveStats
    progress: ProgressBoard
    ranks: Ranks
    recorder: Recorder | None
    client: Client
    tier: LocalTier | None
    agent: NodeAgent | None
    workers: TransferWorkers
    session: Session
    pipeline: SavePipeline
    judge: HealthJudge
    saver: Saver
    rest: RestGate
    restorer: Restorer
    rollback: Rollback
    schedule: Schedule
    standby: StandbySnapshot | None
    preemption: PreemptionWatch
    agreement: StepAgreement
    emergency: EmergencySave


def compose(
    run: str | None,
    *,
    save: Policy | None,
    strict: bool,
    replicated: Iterable[str],
    per_rank: Iterable[str],
    frozen: Iterable[str],
    create: bool | None,
    check_finite: bool | None,
    healthy: HealthRule | None,
    drop: Iterable[str],
    stage_every: int | None,
    host_memory: int | None,
    overlap: bool,
    local: str | Path | None,
    agent: str | Path | None,
    compress: Literal["none", "zstd"] | None,
    config: object,
    chunk_sizes: ChunkSizes | None,
    settings: TrainerSettings | None,
    client_settings: ClientSettings | None,
    end: Callable[[AttemptOutcome, str], None],
) -> Parts:
    """Every part, each made after the parts that it needs. Collective: the ranks agree on themselves and the local
    tier.

    The arguments are the Checkpointer's. `end` ends the attempt; the preemption watch calls it at the deadline. Raises
    ConfigurationError for a wrong setting, before the service is asked anything.
    """
    policy = policy_of(save)
    settings = settings or TrainerSettings()
    run_name = settings.run_name(run)
    declared = Declarations.of(replicated=replicated, per_rank=per_rank, frozen=frozen)
    told = None if config is None else read_config(config)
    sizes = chunk_sizes or ChunkSizes()
    window = window_bytes(settings.host_memory_bytes if host_memory is None else host_memory, sizes)
    check_stage_every(stage_every, window=window)
    stats = SaveStats()
    progress = ProgressBoard()
    ranks = Ranks(timeout_seconds=settings.collective_timeout_seconds, swarms=settings.swarm)
    recorder = follow(settings.verify_dir, ranks, declared)
    if recorder is not None:  # verify-resume must not touch the user's own catalog or node
        run_name, create, local, client_settings = recorder.run(run_name), True, None, None
        agent = None
    client = Client((client_settings or ClientSettings()).compressing(compress))
    node_agent = _node_agent(agent or client.settings.agent, run_name, ranks, settings, client)
    tier, any_rank_has_tier, any_rank_has_agent = open_on_nodes(
        ranks, client.settings, local, has_agent=node_agent is not None
    )
    workers = TransferWorkers(settings.transfers, keeps=tier is not None)
    session = Session(
        client,
        run_name,
        ranks,
        create=create,
        config=told,
        outcome_file=OutcomeFile(run_name, ranks.rank, settings),
        adoption=Adoption(client, run_name, ranks, workers, tier, stats) if any_rank_has_tier else None,
        before_open=functools.partial(_settle, ranks, node_agent, settings) if any_rank_has_agent else None,
    )
    pipeline = SavePipeline(
        session,
        stats,
        workers,
        host_calls=HostCalls.of(
            client, secret=ranks.host_secret, count=len(ranks.host_ranks), leads=ranks.rank == ranks.host_leader
        ),
        retry_seconds=settings.save_retry_seconds,
        progress=progress,
        tier=tier,
        agent=node_agent,
    )
    judge = HealthJudge(healthy, asked=ranks.is_first)
    saver = Saver(
        session,
        pipeline,
        stats,
        declared=declared,
        sizes=sizes,
        check_finite=check_finite,
        judge=judge,
        completeness=Completeness(drop=drop, strict=strict, speaks=ranks.is_first),
        window_bytes=window,
        overlap=overlap,
        helpers=workers.keeping,
        agent=node_agent,
    )
    rest = RestGate(session, waiting=session.progress.restoring)
    restorer = Restorer(
        session,
        workers,
        declared=declared,
        sharing=HostSharing(ranks, settings, client, local=tier.folder if tier else None, agent=node_agent),
        progress=progress,
        rest=rest,
    )
    schedule = Schedule(
        policy,
        ranks,
        busy=lambda: pipeline.busy,
        recommended_seconds=lambda: session.save_interval_seconds,
        known_best=lambda best: known_best(session.brief_client, session.run, best),
    )
    standby = None
    if stage_every is not None:
        standby = StandbySnapshot(stage_every, ranks, saver, pipeline, helpers=workers.keeping)
    preemption = PreemptionWatch(ranks, settings, wants=schedule.wants, has_work=lambda: session.has_opened, end=end)
    preemption.standby = standby
    return Parts(
        strict=strict,
        check_finite=check_finite,
        stats=stats,
        progress=progress,
        ranks=ranks,
        recorder=recorder,
        client=client,
        tier=tier,
        agent=node_agent,
        workers=workers,
        session=session,
        pipeline=pipeline,
        judge=judge,
        saver=saver,
        rest=rest,
        restorer=restorer,
        rollback=Rollback(session, pipeline, restorer),
        schedule=schedule,
        standby=standby,
        preemption=preemption,
        agreement=preemption.agreement,
        emergency=EmergencySave(ranks, saver, pipeline, preemption, stats=stats, progress=progress),
    )


def _node_agent(
    path: str | Path | None, run: RunName, ranks: Ranks, settings: TrainerSettings, client: Client
) -> NodeAgent | None:
    if path is None:
        return None
    return NodeAgent(
        Path(path).expanduser().absolute(),
        run,
        ranks.rank,
        host_ranks=len(ranks.host_ranks),
        transfers=settings.transfers,
        caller=functools.partial(Caller.of, client.settings),
    )


def _settle(ranks: Ranks, agent: NodeAgent | None, settings: TrainerSettings) -> None:
    """Collective: no rank opens the attempt while any node's agent sends what an older launch has left to it. Then each
    agent hears of those of the job's other hosts."""
    seconds = min(settings.agent_wait_seconds, ranks.timeout_seconds / 2)

    def settle() -> PeerHere | None:
        if agent is None:
            return None
        agent.settle(seconds)
        return agent.here()

    told = ranks.together(settle)
    if agent is not None:
        hosts = sorted(set(ranks.host_leaders))
        at = hosts.index(ranks.host_leader)
        agent.meet(ranks.host_leader, [here for host in hosts[at + 1 :] + hosts[:at] if (here := told[host])])
