"""What the training side reads from the environment, beside the client's settings (holdfast_client.settings).

Each is `HOLDFAST_<NAME>`; docs/settings.md is made from the descriptions below.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast.errors import ConfigurationError
from holdfast_protocol.runs import RunName, SelectorError, parse_run


class TrainerSettings(BaseSettings):
    """Read from the environment; a keyword wins over it. Raises ConfigurationError, which names the setting."""

    model_config = SettingsConfigDict(env_prefix="HOLDFAST_", extra="ignore", frozen=True)

    run: str | None = Field(default=None, description="The run, `project/run`, where the script does not name one.")
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
        "save through a window (HOLDFAST_HOST_MEMORY_BYTES) holds training up, and has HOLDFAST_RETRY_SECONDS.",
    )
    transfers: int = Field(default=8, ge=1, le=64, description="Chunks that one rank sends or fetches at once.")
    host_memory_bytes: int | None = Field(
        default=None,
        gt=0,
        description="The most host memory that a rank stages into; a larger state goes through it as a window, and "
        "training waits while it does. Default: as much as the rank's share of the state.",
    )

    preemption_cloud: Literal["auto", "aws", "gcp", "azure", "none"] = Field(
        default="auto",
        description="Whose metadata server one rank per node asks for notices. `auto`: the cloud that the machine's "
        "firmware names; where it names none, nothing is asked.",
    )
    preemption_rebalance: Literal["save", "leave", "ignore"] = Field(
        default="save",
        description="What AWS's rebalance recommendation leads to: a save soon, an emergency save and the end of the "
        "job, or a line in the log. It may come hours before an interruption, and without one.",
    )
    preemption_lead_seconds: float = Field(
        default=300.0,
        ge=0,
        description="How long before a cloud's event is due the job saves and leaves; what is announced later than "
        "that (AWS two minutes, GCP and Azure 30 seconds ahead) at once.",
    )
    preemption_signals: str = Field(
        default="SIGTERM,SIGUSR1",
        description="The signals that tell this job to save and leave; empty: none is taken. Kubernetes and launchers "
        "send SIGTERM, Slurm what `--signal` names.",
    )
    preemption_grace_seconds: float = Field(
        default=27.0,
        gt=0,
        description="How long after SIGTERM the process is killed. Kubernetes and torchrun give 30 s by default; a "
        "signal takes a moment to get here. Raise it with terminationGracePeriodSeconds or --shutdown-timeout. Other "
        "signals bring no deadline, unless this is set.",
    )
    preemption_agree_seconds: float = Field(
        default=8.0,
        gt=0,
        description="How long after SIGTERM all ranks must have answered each other, which background threads do. Else "
        "a rank has crashed, its launcher ends the others, and they end at once. A rank that holds the interpreter's "
        "lock for longer (one long call into C) is taken for crashed.",
    )
    metadata_url: str | None = Field(
        default=None,
        pattern=r"^http://[^/?#@]+/?$",
        description="The cloud's metadata server, where it is not at http://169.254.169.254.",
    )
    launch: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._:-]{1,90}$",
        description="Set by `holdfast launch` for its job: the first part of the launch id of its attempts.",
    )
    outcome_dir: Path | None = Field(
        default=None, description="Set by `holdfast launch` for its job: the folder where each rank tells how it ended."
    )
    verify_dir: Path | None = Field(
        default=None,
        description="Set by `holdfast verify-resume` for the launches of a script: where each rank records its steps.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Where the ranks of a host leave each other the chunks of a restore, for as long as it takes. "
        "Default: the system's folder for temporary files.",
    )
    cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="How much of the disk that may take; 0: each rank fetches for itself. Default: 16 GiB, and never "
        "more than a quarter of what is free.",
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
        """Raises ConfigurationError for a name that is no signal's."""
        names = [name.strip().upper() for name in self.preemption_signals.split(",") if name.strip()]
        try:
            return tuple(signal.Signals[name] for name in names)
        except KeyError as error:
            raise ConfigurationError(
                f"HOLDFAST_PREEMPTION_SIGNALS names {error}, which is no signal. Write such as SIGTERM,SIGUSR1."
            ) from None

    def grace_seconds_after(self, number: signal.Signals) -> float | None:
        """From this signal until the process is killed; None: nobody says when. What Slurm's `--signal` announces comes
        long before the SIGTERM at the end of the job's time."""
        is_said = number is signal.SIGTERM or "preemption_grace_seconds" in self.model_fields_set
        return self.preemption_grace_seconds if is_said else None

    def run_name(self, given: str | None) -> RunName:
        """The run that the script names, else HOLDFAST_RUN. Raises ConfigurationError where neither names one."""
        text = given or self.run
        if not text:
            raise ConfigurationError('No run is named. Write Checkpointer("project/run"), or set HOLDFAST_RUN.')
        try:
            return parse_run(text)
        except SelectorError as error:
            raise ConfigurationError(f"{error}.") from None
