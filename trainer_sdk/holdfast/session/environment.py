"""The environment of an attempt: versions, GPUs, the script's commit. Sent when it is opened, compared on resume.

    session.open -> **environment()**, once a launch -> the attempt's row
    restore -> **differences()** between the attempt that wrote the restore point and this one -> the log

Facts are short texts for people. Unknown facts are left out; nothing here may fail or take long.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from holdfast_protocol.text import fold_hosts, printable

_GIT_SECONDS = 2.0
_LONGEST_FACT = 1000
_DRIVER = Path("/proc/driver/nvidia/version")

_TOLD = {
    "holdfast": "holdfast",
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "gpu": "the GPU",
    "gpus_per_host": "the number of GPUs on rank 0's host",
    "gpu_driver": "the GPU's driver",
    "git_commit": "the script's git commit",
    "git_dirty": "whether the script's folder has changes that are not committed",
}
"""The facts that are compared, and their names in the log. Not the platform: a newer kernel changes no bit."""


def environment(hosts: Collection[str] = ()) -> dict[str, str]:
    """The facts of this process, for the attempt that it opens, and which `hosts` its ranks are on. Those of GPUs are
    told if the process uses CUDA by now: asking would begin it, and what is forked later could use none. Takes
    `_GIT_SECONDS` at most."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    with suppress(PackageNotFoundError):  # a source tree on the path, not installed
        facts["holdfast"] = version("holdfast")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        facts |= _gpu_facts()
    facts |= commit_of(_script_folder())
    if job := os.environ.get("SLURM_JOB_ID"):
        facts["slurm_job"] = job
    told = {name: printable(value[:500], one_line=True) for name, value in facts.items() if value}
    if len(hosts) > 1:  # of one, the attempt has the name
        told["hosts"] = fold_hosts(hosts, most_characters=_LONGEST_FACT)
    return told


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One sentence for each fact of `_CALLED` that differs; a fact that either side lacks does not count. Pure."""
    return [
        f"{called} was {then[name]} and is {now[name]}"
        for name, called in _TOLD.items()
        if name in then and name in now and then[name] != now[name]
    ]


def commit_of(folder: Path | None) -> dict[str, str]:
    """The commit that the repository around `folder` has checked out, read from its files. Only git itself can tell
    whether tracked files are changed, if it is installed and quick."""
    if folder is None:
        return {}
    found = next(((up, up / ".git") for up in (folder, *folder.parents) if (up / ".git").exists()), None)
    commit = None if found is None else _head(found[1])
    if found is None or commit is None:
        return {}
    dirty = _is_dirty(found[0])
    return {"git_commit": commit} | ({} if dirty is None else {"git_dirty": "yes" if dirty else "no"})


def _gpu_facts() -> dict[str, str]:
    facts = {"gpu": torch.cuda.get_device_name(), "gpus_per_host": str(torch.cuda.device_count())}
    facts["cuda"] = torch.version.cuda or ""
    if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    facts["gpu_driver"] = _driver()
    return facts


def _driver() -> str:
    # The kernel module says so in a file; asking NVML would need a library, and nvidia-smi takes a second.
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text())
    except (OSError, UnicodeDecodeError):
        return ""
    return found.group(1) if found else ""


def _script_folder() -> Path | None:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return Path(script).resolve().parent if script else Path.cwd()
    except OSError:
        return None


def _head(git: Path) -> str | None:
    """The commit of a `.git`: a folder, or in worktrees and submodules a file that names one."""
    try:
        if git.is_file():
            git = (git.parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return _as_commit(head)
        ref = head.removeprefix("ref:").strip()
        common = git / "commondir"
        shared = (git / common.read_text().strip()).resolve() if common.exists() else git
        for folder in (git, shared):
            if (folder / ref).is_file():
                return _as_commit((folder / ref).read_text().strip())
        packed = shared / "packed-refs"
        lines = packed.read_text().splitlines() if packed.exists() else []
        return next((_as_commit(line.split(" ", 1)[0]) for line in lines if line.endswith(f" {ref}")), None)
    except (OSError, UnicodeDecodeError):
        return None


def _as_commit(text: str) -> str | None:
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _is_dirty(repository: Path) -> bool | None:
    # It takes no locks and starts no monitor: training must leave no traces in the user's repository.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain", "--untracked-files=no"]
    try:
        told = subprocess.run(
            command,
            cwd=repository,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(told.stdout.strip())
