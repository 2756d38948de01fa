"""What SOURCE is: one checkpoint or a series of them, each with its step and its format. Opens no file but an
index of Hugging Face's, for the names of the files that are read.

Flow: the command -> **sources** -> the reader of the format.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from holdfast.export.hf.model_files import names_in
from holdfast.imports.safetensors_weights import files_of
from holdfast_client.errors import ConfigurationError

_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
_SAFETENSORS = ".safetensors"
_INDEX = "*.safetensors.index.json"
_TORCH_INDEX = "*.bin.index.json"
_WEIGHTS = (_INDEX, f"*{_SAFETENSORS}", _TORCH_INDEX, "pytorch_model.bin")
"""What is a model by its name, as Hugging Face writes it; the first that is there."""
_STEP = re.compile(r"(?:checkpoint|ckpt|global_step|step|iter|epoch=\d+-step)[-_=]?(\d{1,18})")
_BESIDE = re.compile(r"(?:optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)[-_.]")
"""What Trainer and Accelerate write beside the weights: it is no checkpoint by itself."""
_FORMATS = (
    f"a torch file ({', '.join(_TORCH)}), a .safetensors file, a folder with either, or a folder of "
    "torch.distributed.checkpoint"
)


class SourceFormat(StrEnum):
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


@dataclass(frozen=True)
class Source:
    """One checkpoint. `path`: the file that is read, the index of several, or the folder of torch.distributed."""

    path: Path
    format: SourceFormat
    step: int
    left_out: tuple[str, ...] = ()
    """The names of the files beside it in its own folder, which are not read, such as optimizer.pt of Trainer."""
    model_files: tuple[str, ...] = ()
    """The names of config.json and tokenizer beside it, which are kept with it."""


def find_sources(given: Path, step: int | None) -> list[Source]:
    """By step. With `step`, `given` is one checkpoint. Without it, a series (`checkpoint-500`, `step_500`, …), or one
    checkpoint whose name has the step. Raises ConfigurationError, which says what was found instead; also for a folder
    of several with `step`, because its own files may be another step's."""
    if not given.exists():
        raise ConfigurationError(f"{given} is not there. Give {_FORMATS}.")
    series = _series(given) if given.is_dir() and not _is_one(given) else []
    if series and step is None:
        return series
    try:
        found = _one(given, _step_of(given) if step is None else step)
    except ConfigurationError:
        if not series:
            raise
        found = None
    alike = [source for source in series if source.step == step] or series
    if alike and (found is None or [source.path for source in alike] != [found.path]):
        paths = [str(source.path) for source in (*alike[:10], *([found] if found else []))]
        raise ConfigurationError(
            f"{given} has several checkpoints, and which of them is step {step} is not said. Name one: "
            f"{', '.join(dict.fromkeys(paths))}."
        )
    if found is None:
        raise ConfigurationError(f"{given} is no checkpoint that can be imported. Give {_FORMATS}.")
    if found.step < 0:
        raise ConfigurationError(
            f"The name of {given} does not say its step. Say it after the run: demo/gpt@1200, or @0 for a base model."
        )
    return [found]


def _series(folder: Path) -> list[Source]:
    found: dict[int, Source] = {}
    for path in sorted(folder.iterdir()):
        step = _step_of(path)
        source = _one(path, step) if step >= 0 else None
        if source is None:
            continue
        if step in found:
            raise ConfigurationError(
                f"{found[step].path} and {source.path} are both step {step}. Move one of them away, or import them one "
                "by one."
            )
        found[step] = source
    return [found[step] for step in sorted(found)]


def _is_one(folder: Path) -> bool:
    """Whether it is a checkpoint by its name and its files. DeepSpeed has a `global_step500` of its own in it."""
    weights = (each for each in folder.iterdir() if _ending(each) and not _BESIDE.match(each.name))
    is_model = (folder / ".metadata").exists() or any(_step_of(each) < 0 for each in weights if not each.is_dir())
    return is_model and _step_of(folder) >= 0


def _step_of(path: Path) -> int:
    """-1 if its name does not say it."""
    name = path.resolve().name if path.name in ("", ".", "..") else path.name
    match = _STEP.fullmatch(name.removesuffix(_ending(path)))
    return int(match[1]) if match else -1


def _one(path: Path, step: int) -> Source | None:
    if not path.is_dir():
        if path.match(_TORCH_INDEX):
            raise ConfigurationError(
                f"{path} is of a model in several torch files, which cannot be imported. Save it as safetensors: "
                "load it with transformers, and call save_pretrained()."
            )
        if _ending(path) in _TORCH:
            return Source(path, SourceFormat.TORCH, step)
        is_safetensors = _ending(path) == _SAFETENSORS or _is_index(path)
        return Source(path, SourceFormat.SAFETENSORS, step) if is_safetensors else None
    if (path / ".metadata").exists():
        return Source(path, SourceFormat.DCP, step)
    for kinds in (*([kind] for kind in _WEIGHTS), [f"*{suffix}" for suffix in _TORCH]):
        files = sorted(each for kind in kinds for each in path.glob(kind) if not _BESIDE.match(each.name))
        if len(files) > 1:
            raise ConfigurationError(
                f"{path} has {', '.join(each.name for each in files[:10])}, and nothing says which is the checkpoint. "
                "Name the file."
            )
        if files and (found := _one(files[0], step)) is not None:
            model_files = names_in(path)
            read = {files[0].name, *(files_of(files[0]) if _is_index(files[0]) else ()), *model_files}
            beside = sorted(each.name for each in path.iterdir() if not each.is_dir() and each.name not in read)
            return dataclasses.replace(found, left_out=tuple(beside), model_files=tuple(model_files))
    if beside := sorted(each.name for each in path.iterdir() if _ending(each) and _BESIDE.match(each.name)):
        raise ConfigurationError(f"{path} has {', '.join(beside[:10])}, and no weights. Name the file if you mean it.")
    return None


def _ending(path: Path) -> str:
    """Of the files that are read; of others nothing."""
    return next((ending for ending in (*_TORCH, _SAFETENSORS) if path.name.endswith(ending)), "")


def _is_index(path: Path) -> bool:
    return path.match(_INDEX)
