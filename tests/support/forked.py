"""Python programs as processes that start in a moment: forked from one that has imported torch, SDK and service.

To import them takes seconds of a core, which is more than most of what such a process then does. A fork has the
environment, the folder, the output and the random numbers that a new process would have; it leads a session of its own
and is killed like any other. What is promised about the start of a process itself is tested with new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO

_IMPORTED = [
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes 0.7 s of a core
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "httpcore",
    "holdfast.checkpointer",
    "holdfast_client.cli.main",
    "holdfast_service.cli",
    "holdfast_service.serve",
    "pytest",  # a function of a test's file is imported with that file
]
_PR_SET_PDEATHSIG = 1


def fork_server() -> ForkServerContext:
    """Starts processes of the functions that it is given: one server for each process of the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class ForkedProgram:
    """`python -m module arguments…`, or an entry point `module:function`, with what a test uses of subprocess.Popen.

    All output goes to `log`. Without one, what it prints goes to `stdout`, and its errors to the file `errors`, or to
    those of the tests.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
        log: Path | None = None,
        errors: Path | None = None,
    ) -> None:
        context = fork_server()
        stdin, ours = context.Pipe(duplex=False)
        theirs, stdout = context.Pipe(duplex=False)
        self.stdin: IO[str] = os.fdopen(os.dup(ours.fileno()), "w")
        self.stdout: IO[str] = os.fdopen(os.dup(theirs.fileno()), "r")
        # As a daemon it is ended with the test process, if a test forgets it.
        self._process = context.Process(
            target=_run,
            args=(program, list(arguments), dict(environment), folder or Path.cwd(), stdin, stdout, log, errors),
            daemon=True,
        )
        self._process.start()
        for end in (stdin, ours, theirs, stdout):
            end.close()
        if log is not None:
            self.stdin.close()
            self.stdout.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    program: str, arguments: Sequence[str], *, environment: Mapping[str, str], typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output captured, of a ForkedProgram that ends by itself. `typed`: its stdin."""
    with tempfile.NamedTemporaryFile() as errors:
        program_errors = Path(errors.name)
        process = ForkedProgram(program, arguments, environment=environment, errors=program_errors)
        with process.stdin, process.stdout:
            process.stdin.write(typed or "")
            process.stdin.close()
            printed = process.stdout.read()
            code = process.wait(120)
        return subprocess.CompletedProcess([program, *arguments], code, printed, program_errors.read_text())


def own_random_numbers() -> None:
    """Those of a new process: a fork has its parent's."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()


def _run(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    stdin: Connection,
    stdout: Connection,
    log: Path | None,
    errors: Path | None,
) -> None:
    end_with_parent()
    os.setsid()
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    if log is not None:
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    if errors is not None:
        with errors.open("ab") as output:
            os.dup2(output.fileno(), 2)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    stdin.close()
    stdout.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    own_random_numbers()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(folder))
    module, _, function = program.partition(":")
    try:
        if function:
            getattr(importlib.import_module(module), function)()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them


def end_with_parent() -> None:
    """So that tests which are killed leave no process behind. Linux has it, others do without."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
