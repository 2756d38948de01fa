"""Python processes that start with torch imported: forked from one that has it, for tests of short scripts.

`WarmPython(folder)` is the one that has it. `warm.command(script, …)` is a command like any other: a small process
that asks for a fork, hands over its environment and output, and ends as the fork ends. The fork is a process of its own
in a session of its own, and can be killed like any other. Who needs no command takes tests/support/forked.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.forked import end_with_parent

_ASK = """
import json, os, socket, sys
asking = socket.socket(socket.AF_UNIX)
asking.connect(sys.argv[1])
request = json.dumps({"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
socket.send_fds(asking, [len(request).to_bytes(4, "big")], [1, 2])
asking.sendall(request)
ended = asking.recv(1)
sys.exit(ended[0] if ended else 1)
"""


class WarmPython:
    """Use it as a context manager. Its folder's path must be short: a socket lies in it.

    `python_path`: where the SDK is imported from, and this module.
    """

    def __init__(self, folder: Path, python_path: str | None = None) -> None:
        self._socket = folder / "warm"
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.support.warm_python import serve; serve(sys.argv[1])",
             str(self._socket)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
            env=dict(os.environ) if python_path is None else os.environ | {"PYTHONPATH": python_path},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"warm\n"

    def command(self, script: Path, *arguments: str) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", _ASK, str(self._socket), str(script), *arguments]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(path: str) -> None:
    """Forks for each request, one at a time in flight per connection; runs until it is killed."""
    import torch

    import holdfast.checkpointer
    import holdfast.data
    import holdfast.verify.recorder  # noqa: F401

    # torch imports much of itself at an optimizer's first step.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("warm", flush=True)
        while True:
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _serve_one(asking)
            asking.close()
            _reap()


def _serve_one(asking: socket.socket) -> None:
    """In a process of its own, which tells the asker how the script ended."""
    end_with_parent()
    size, outputs, _, _ = socket.recv_fds(asking, 4, 2)
    wanted = int.from_bytes(size, "big")
    request = b""
    while len(request) < wanted:
        request += asking.recv(wanted - len(request))
    pid = os.fork()
    if pid == 0:
        _run(json.loads(request), outputs)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # the asker was killed as well
        asking.sendall(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
    os._exit(0)


def _run(request: dict[str, object], outputs: list[int]) -> None:
    import runpy

    end_with_parent()
    os.setsid()
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    os.chdir(str(request["folder"]))
    sys.argv = list(request["arguments"])  # type: ignore[call-overload]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
