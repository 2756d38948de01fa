"""`holdfast verify-resume`: the command, which adds itself to the client's CLI. Only the script imports torch."""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from holdfast.verify.embedded_service import can_serve, embedded_service, job_environment
from holdfast.verify.report import as_document, as_text
from holdfast.verify.verification import Verdict, Verifier
from holdfast_client.cli.arguments import JsonOption
from holdfast_client.cli.output import ExitCode
from holdfast_client.errors import ConfigurationError

_TERMINATED = 128 + signal.SIGTERM
_SERVICE = (
    *("HOLDFAST_URL", "HOLDFAST_TOKEN", "HOLDFAST_LOGIN_DIR", "HOLDFAST_DATA_DIR"),
    *("HOLDFAST_IDENTITY_TOKEN_FILE", "HOLDFAST_IDENTITY_AUDIENCE", "HOLDFAST_IDENTITY_PLATFORM"),
    *("HOLDFAST_IDENTITY_PROJECT", "HOLDFAST_IDENTITY_ROLE"),
    *("HOLDFAST_CA_FILE", "HOLDFAST_CLIENT_CERTIFICATE", "HOLDFAST_CLIENT_KEY"),
)


def register(app: typer.Typer) -> None:
    """Raises ModuleNotFoundError if torch is not installed; the CLI then names the extra that has it."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    app.command(
        "verify-resume",
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(verify_resume)


def verify_resume(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What starts the training, after `--`.")],
    *,
    steps: Annotated[int, typer.Option(min=2, help="Steps to train in all.")] = 6,
    kill_at: Annotated[
        int | None, typer.Option("--kill-at", min=1, help="Killed after so many of them. Default: half.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="A new folder for store, records and output, which stays. Default: a temporary one."),
    ] = None,
    use_service: Annotated[
        bool, typer.Option("--use-service", help="Use the service of HOLDFAST_URL, in runs of their own.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one launch may take.")] = 1800.0,
    json: JsonOption = False,
) -> None:
    """Is this script's resume exact? Train it straight, and killed and resumed; compare bit for bit.

    The command is launched three times as it stands, for a few steps each: straight, killed with SIGKILL once a step
    is committed, and resumed. Metrics, tensors, values and random numbers are compared at each step. Where they differ,
    the report names the first step and tensor, and the piece of state that is likely missing.
    Ends with 0 if all is equal, with 1 if not, and with 1 where neither a metric nor a tensor was there to compare.
    """
    kill_after = steps // 2 if kill_at is None else kill_at
    if kill_after >= steps:
        raise ConfigurationError(f"--kill-at {kill_after} leaves no step to resume; give less than --steps {steps}.")
    # As Ctrl-C does: end the launch and the service, and remove the folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    with _work_folder(folder) as work, _service(work, use_service=use_service) as environment:
        verifier = Verifier(command, work / "launches", environment, timeout_seconds=timeout, say=_say)
        verification = verifier.verify(steps, kill_after)
    text = json_module.dumps(as_document(verification), indent=2) if json else as_text(verification)
    sys.stdout.write(text + "\n")
    if verification.verdict is not Verdict.EXACT:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _work_folder(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-verify-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty. Name a new folder for --folder.")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder.resolve()


@contextmanager
def _service(work: Path, *, use_service: bool) -> Iterator[dict[str, str]]:
    """The environment of the launches."""
    if not use_service and can_serve():
        with embedded_service(work) as found:
            yield job_environment(found)
        return
    if not use_service and "HOLDFAST_URL" not in os.environ:
        raise ConfigurationError(
            'The service is not installed here. Install it with: pip install "holdfast[service]", '
            "or name a running one in HOLDFAST_URL: it is used with runs of their own."
        )
    _say("checkpoints go to the service of HOLDFAST_URL, into runs whose names end in verify-…; prune them as you like")
    yield job_environment({name: os.environ[name] for name in _SERVICE if name in os.environ})


def _say(text: str) -> None:
    sys.stderr.write(f"verify-resume: {text}\n")
    sys.stderr.flush()
