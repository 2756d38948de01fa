"""config.json, generation_config.json and tokenizer of a model of transformers, in its checkpoints.

The model, the tokenizer -> save_pretrained() into a temporary folder, before training -> **ModelFiles** -> each
     checkpoint
     -> `holdfast checkpoints pull --format hf` writes them beside the weights
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from holdfast.export.hf.model_files import MOST_BYTES, as_component, may_be_kept
from holdfast.state.components import FitsAnyWorld, unwrap

log = logging.getLogger("holdfast")


class ModelFiles(FitsAnyWorld):
    """A component of the state that keeps what `holdfast checkpoints pull --format hf` needs beside the weights:

        state = {"model": model, "optimizer": optimizer, "hf_files": ModelFiles(model, tokenizer)}

    Rank 0 keeps the files, as chunks that only the first save sends. They are written here, so make it before training
    begins; a save writes them again only if the script has changed the config, the generation config or the tokenizer.
    A restore loads nothing from them. Leave the key out of the state that is restored from a checkpoint which has no
    such component.
    """

    def __init__(self, model: torch.nn.Module, processing_class: Any = None) -> None:
        """`processing_class`: the tokenizer, or a processor; anything with save_pretrained()."""
        self.model = model
        self._processing_class = processing_class
        self._written: tuple[list[str], dict[str, Any]] | None = None
        self.state_dict()  # a tokenizer has many megabytes, and no step of training waits for them

    def state_dict(self) -> dict[str, Any]:
        """Empty on other ranks than 0, and for a model that is none of transformers."""
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return {}
        model = unwrap(self.model)
        if not isinstance(model, PreTrainedModel):
            return {}
        told = _told(model, self._processing_class)
        if self._written is None or self._written[0] != told:  # a script may change it while it trains
            files = _files_of(model, self._processing_class)
            self._written = told, as_component(files) if files else {}
        return self._written[1]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The live model has its config already."""

    def load_resharded_state_dict(self, states: list[Any], *, rank: int, world_size: int) -> None:
        """Likewise."""


def _told(model: PreTrainedModel, processing_class: Any) -> list[str]:
    """Other texts when what is written has changed, without writing it: of a tokenizer its special and added tokens,
    its options and its template. What cannot be told is taken for unchanged."""
    tells: tuple[Callable[[], object], ...] = (
        lambda: model.config.to_json_string(use_diff=False),
        lambda: model.generation_config,
        lambda: processing_class,
        lambda: processing_class.chat_template,
        lambda: processing_class.tokenizer.chat_template,
    )
    told = []
    for tell in tells:
        with suppress(Exception):  # a value of the user's own; _files_of() says so in the log
            told.append(f"{tell()!r}")
    return told


def _files_of(model: PreTrainedModel, processing_class: Any) -> dict[str, bytes]:
    """By their paths, as save_pretrained() of the model and of the processing class writes them. What cannot be written
    is told in the log: a save must not fail for it."""

    def write_config(folder: str) -> None:
        config = copy.deepcopy(model.config)
        # As save_pretrained() of the model does it; fully_shard makes a class of its own.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)

    def write_generation_config(folder: str) -> None:
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)

    writers: list[Callable[[str], object]] = [write_config, write_generation_config]
    if hasattr(processing_class, "save_pretrained"):
        writers.append(processing_class.save_pretrained)
    files: dict[str, bytes] = {}
    for write in writers:
        try:
            files |= _written_by(write)
        except Exception as error:  # a user's own class, a config that transformers does not write, a full disk
            log.warning(
                "a part of config and tokenizer is not kept, so pull --format hf needs --config: %s: %s",
                type(error).__name__,
                error,
            )
    total = sum(map(len, files.values()))
    if total > MOST_BYTES:
        log.warning(
            "config and tokenizer have %d bytes, and %d are the most: they are not kept, so pull --format hf needs "
            "--config",
            total,
            MOST_BYTES,
        )
        return {}
    return files


def _written_by(write: Callable[[str], object]) -> dict[str, bytes]:
    """What it writes into a folder of its own. If it raises, nothing of it: a full disk leaves half a file."""
    with tempfile.TemporaryDirectory(prefix="holdfast-hf-") as folder:
        write(folder)
        paths = {
            path.relative_to(folder).as_posix(): path for path in sorted(Path(folder).rglob("*")) if path.is_file()
        }
        return {name: path.read_bytes() for name, path in paths.items() if may_be_kept(name)}
