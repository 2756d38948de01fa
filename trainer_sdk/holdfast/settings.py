"""The settings of the training side, beside the client's (holdfast_client.settings).

Each is `HOLDFAST_<NAME>`; docs/settings.md is made from the descriptions below.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast.errors import ConfigurationError
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import SelectorError, parse_run


class TrainerSettings(BaseSettings):
    """Read from the environment; a keyword wins over it. Raises ConfigurationError, which names the setting."""

    model_config = SettingsConfigDict(env_prefix="HOLDFAST_", extra="ignore", frozen=True)

    run: str | None = Field(default=None, description="The run, `project/run`, if the script names none.")
    collective_timeout_seconds: float = Field(
        default=1800.0, gt=0, description="How long a rank waits for the others; it waits half of it for a save."
    )
    drain_seconds: float = Field(
        default=300.0, ge=0, description="How long the end of the `with` block waits for the save in flight."
    )
    save_retry_seconds: float = Field(
        default=900.0,
        ge=0,
        description="How long a staged save is retried in the background while service or store are unavailable. A "
        "save through a window (HOLDFAST_HOST_MEMORY_BYTES) blocks training, and is retried HOLDFAST_RETRY_SECONDS.",
    )
    transfers: int = Field(default=8, ge=1, le=64, description="Chunks that one rank sends or fetches at once.")
    host_memory_bytes: int | None = Field(
        default=None,
        gt=0,
        description="The most host memory that a rank stages into. A larger state goes through it as a window, and "
        "training waits for that. Default: as much as the rank's share of the state.",
    )

    agent_wait_seconds: float = Field(
        default=300.0,
        ge=0,
        description="How long a new launch waits for what an earlier one has left to the agent, before it opens its "
        "attempt: afterwards these saves are refused.",
    )

    preemption_cloud: Literal["auto", "aws", "gcp", "azure", "none"] = Field(
        default="auto",
        description="The cloud whose metadata server one rank per node asks for notices. `auto`: the cloud that the "
        "machine's firmware names; if it names none, nothing is asked.",
    )
    preemption_rebalance: Literal["save", "leave", "ignore"] = Field(
        default="save",
        description="The answer to AWS's rebalance recommendation: a save soon, an emergency save and the end of the "
        "job, or a line in the log. It may come hours before an interruption, or without one.",
    )
    preemption_lead_seconds: float = Field(
        default=300.0,
        ge=0,
        description="How long before a cloud's event is due the job saves and leaves. A later announcement (AWS gives "
        "two minutes, GCP and Azure 30 seconds) makes it save and leave at once.",
    )
    preemption_signals: str = Field(
        default="SIGTERM,SIGUSR1",
        description="The signals that tell this job to save and leave; empty: none. Kubernetes and launchers "
        "send SIGTERM, Slurm the signal that `--signal` names.",
    )
    preemption_grace_seconds: float = Field(
        default=27.0,
        gt=0,
        description="How long after SIGTERM the process is killed. Kubernetes and torchrun give 30 s by default, less "
        "the moment that a signal takes to arrive. Raise it with terminationGracePeriodSeconds or --shutdown-timeout. "
        "Other signals bring no deadline, unless this is set.",
    )
    preemption_agree_seconds: float = Field(
        default=8.0,
        gt=0,
        description="How long after SIGTERM the background threads of all ranks may take to answer each other. After "
        "that a rank counts as crashed: its launcher ends the others, and they end at once. A rank that holds the "
        "interpreter's lock for longer (one long call into C) counts as crashed too.",
    )
    metadata_url: str | None = Field(
        default=None,
        pattern=r"^http://[^/?#@]+/?$",
        description="The cloud's metadata server, if it is not at http://169.254.169.254.",
    )
    launch: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._:-]{1,90}$",
        description="Set by `holdfast launch` for its job: the first part of its attempts' launch ids.",
    )
    outcome_dir: Path | None = Field(
        default=None, description="Set by `holdfast launch` for its job: the folder that tells how each rank ended."
    )
    verify_dir: Path | None = Field(
        default=None,
        description="Set by `holdfast verify-resume` for a script's launches: the folder for each rank's records.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="The folder in which the ranks of a host share the chunks of a restore while it runs. "
        "Default: the system's folder for temporary files.",
    )
    cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="The most disk that the shared chunks may take; 0: each rank fetches for itself. Default: 16 GiB, "
        "but at most a quarter of the free disk.",
    )

    swarm: bool = Field(
        default=False,
        description="At a restore the hosts of the job pass on to each other what several of them want, so that it "
        "leaves the store once. Their ranks listen on a port meanwhile, and the bytes are not encrypted on the way. "
        "Ranks with HOLDFAST_MAX_BYTES_PER_SECOND take no part.",
    )
    swarm_address: str | None = Field(
        default=None,
        description="The address on which this host's ranks answer the job's other hosts. Default: the address of "
        "this host on the way to MASTER_ADDR.",
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            setting = "HOLDFAST_" + "_".join(str(part) for part in first["loc"]).upper()
            raise ConfigurationError(f"{setting} is not usable: {first['msg']}.") from None

    @property
    def preemption_signal_numbers(self) -> tuple[signal.Signals, ...]:
        """Raises ConfigurationError for a name that is not a signal's."""
        names = [name.strip().upper() for name in self.preemption_signals.split(",") if name.strip()]
        try:
            return tuple(signal.Signals[name] for name in names)
        except KeyError as error:
            raise ConfigurationError(
                f"HOLDFAST_PREEMPTION_SIGNALS names {error}, which is no signal. Write such as SIGTERM,SIGUSR1."
            ) from None

    def grace_seconds_after(self, number: signal.Signals) -> float | None:
        """Seconds from this signal until the process is killed; None: unknown. Slurm's `--signal` comes long before the
        SIGTERM at the end of the job's time."""
        is_said = number is signal.SIGTERM or "preemption_grace_seconds" in self.model_fields_set
        return self.preemption_grace_seconds if is_said else None

    def run_name(self, given: str | None) -> RunName:
        """The run that the script names, else HOLDFAST_RUN. Raises ConfigurationError if neither names one."""
        text = given or self.run
        if not text:
            raise ConfigurationError('No run is named. Write Checkpointer("project/run"), or set HOLDFAST_RUN.')
        try:
            return parse_run(text)
        except SelectorError as error:
            raise ConfigurationError(f"{error}.") from None
