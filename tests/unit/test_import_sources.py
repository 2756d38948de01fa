"""What `holdfast import` takes a file or folder for: format, step, components, and what it refuses unread."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from holdfast.imports.checkpoint_plan import Choices, plan_import
from holdfast.imports.dcp_source import open_dcp_folder
from holdfast.imports.safetensors_weights import open_safetensors
from holdfast.imports.source_state import SourceState, components_in
from holdfast.imports.sources import SourceFormat, find_sources
from holdfast.imports.torch_file import open_torch_file
from holdfast_client.errors import ConfigurationError
from holdfast_protocol.base import RunName


def make(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("step_500", 500),
        ("step-0500", 500),
        ("global_step500", 500),
        ("global_step_500", 500),
        ("step500.pt", 500),
        ("checkpoint-7.safetensors", 7),
        ("epoch=3-step=500.ckpt", 500),
        ("iter_5000.pth", 5000),
        ("ckpt-500.pt", 500),
        ("checkpoint_7.pth.tar", 7),
    ],
)
def test_the_usual_names_say_the_step(tmp_path, name, step):
    path = tmp_path / name
    make(path if path.suffix else path / "model.safetensors")
    assert [source.step for source in find_sources(path, None)] == [step]
    assert [source.step for source in find_sources(tmp_path, None)] == [step]
    assert [source.step for source in find_sources(path, 3)] == [3]


@pytest.mark.parametrize("name", ["final.pt", "epoch-3.pt", "step_5_ema.pt", "mystep5.pt"])
def test_another_name_needs_the_step_to_be_said(tmp_path, name):
    make(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"does not say its step.*@1200"):
        find_sources(tmp_path / name, None)
    assert find_sources(tmp_path / name, 0)[0].step == 0


def test_a_series_is_in_the_order_of_its_steps_and_other_things_beside_it_are_none(tmp_path):
    make(*(tmp_path / f"checkpoint-{step}" / "model.safetensors" for step in (1000, 20, 300)))
    make(tmp_path / "runs" / "events", tmp_path / "model.safetensors", tmp_path / "checkpoint-40" / "notes.txt")
    assert [source.step for source in find_sources(tmp_path, None)] == [20, 300, 1000]
    make(tmp_path / "step_20" / "model.pt")
    with pytest.raises(ConfigurationError, match="both step 20"):
        find_sources(tmp_path, None)


def test_a_folder_of_several_steps_is_none_of_them_and_not_its_final_model_either(tmp_path):
    final, inner = tmp_path / "model.safetensors", tmp_path / "checkpoint-1000" / "model.safetensors"
    make(final, inner, tmp_path / "checkpoint-500" / "model.safetensors")
    with pytest.raises(ConfigurationError, match=rf"which of them is step 1000.*Name one: {inner}, {final}\."):
        find_sources(tmp_path, 1000)
    with pytest.raises(ConfigurationError, match=rf"which of them is step 7.*checkpoint-500.*{inner}, {final}\."):
        find_sources(tmp_path, 7)
    assert [source.path for source in find_sources(final, 1000)] == [final]
    final.rename(tmp_path / "training_args.bin")
    with pytest.raises(ConfigurationError, match=rf"which of them is step 1000.*Name one: {inner}\."):
        find_sources(tmp_path, 1000)


@pytest.mark.parametrize("model", ["model.safetensors", "weights.pt"])
@pytest.mark.parametrize("states", [["mp_rank_00.pt"], ["mp_rank_00.pt", "mp_rank_01.pt"]])
def test_the_model_of_a_trainer_on_deepspeed_is_taken_and_not_the_states_of_its_ranks(tmp_path, states, model):
    folder = tmp_path / "checkpoint-500"
    make(
        folder / model,
        folder / "latest",
        folder / "scheduler.pt",
        *(folder / "global_step500" / name for name in states),
    )
    for given, step in ((folder, None), (folder, 500), (folder, 7), (tmp_path, None)):
        [source] = find_sources(given, step)
        assert (source.path, source.step) == (folder / model, step or 500)


@pytest.mark.parametrize("name", ["scheduler.pt", "optimizer.bin", "rng_state_0.pth", "training_args.bin", "scaler.pt"])
def test_what_lies_beside_weights_is_no_checkpoint_unless_it_is_named(tmp_path, name):
    folder = tmp_path / "checkpoint-5"
    make(folder / name)
    for given in (folder, tmp_path):
        with pytest.raises(ConfigurationError, match=rf"checkpoint-5 has {name}, and no weights"):
            find_sources(given, None)
    assert find_sources(folder / name, 5)[0].path == folder / name
    make(folder / "weights.pt")
    [source] = find_sources(folder, None)
    assert (source.path.name, source.left_out) == ("weights.pt", (name,))


def test_a_folder_with_one_file_is_that_file_whatever_step_its_name_has(tmp_path):
    make(tmp_path / "one" / "step500.pt", tmp_path / "one" / "notes.txt")
    for step in (500, 3):
        [source] = find_sources(tmp_path / "one", step)
        assert (source.path.name, source.step, source.left_out) == ("step500.pt", step, ("notes.txt",))


def test_the_format_follows_the_files_and_what_is_left_is_named(tmp_path):
    make(tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "optimizer.pt", tmp_path / "hf" / "config.json")
    cut = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    make(*(tmp_path / "cut" / name for name in (*cut.values(), "optimizer.pt", "consolidated.safetensors")))
    (tmp_path / "cut" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": cut}))
    make(tmp_path / "old" / "pytorch_model.bin", tmp_path / "old" / "training_args.bin")
    make(tmp_path / "dcp" / ".metadata", tmp_path / "dcp" / "__0_0.distcp")
    found = {name: find_sources(tmp_path / name, 1)[0] for name in ("hf", "cut", "old", "dcp")}
    assert {name: (source.format, source.left_out) for name, source in found.items()} == {
        "hf": (SourceFormat.SAFETENSORS, ("optimizer.pt",)),
        "cut": (SourceFormat.SAFETENSORS, ("consolidated.safetensors", "optimizer.pt")),
        "old": (SourceFormat.TORCH, ("training_args.bin",)),
        "dcp": (SourceFormat.DCP, ()),
    }
    make(tmp_path / "ranks" / "mp_rank_00.pt", tmp_path / "ranks" / "mp_rank_01.pt")
    with pytest.raises(ConfigurationError, match=r"mp_rank_00\.pt, mp_rank_01\.pt, and nothing says which"):
        find_sources(tmp_path / "ranks", 1)
    make(*(tmp_path / "bin" / f"pytorch_model{name}" for name in ("-1.bin", "-2.bin", ".bin.index.json")))
    for given in (tmp_path / "bin", tmp_path / "bin" / "pytorch_model.bin.index.json"):
        with pytest.raises(ConfigurationError, match=r"several torch files.*save_pretrained"):
            find_sources(given, 1)
    with pytest.raises(ConfigurationError, match="is not there"):
        find_sources(tmp_path / "nothing", 1)
    with pytest.raises(ConfigurationError, match="no checkpoint that can be imported"):
        find_sources(tmp_path, 1)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"w": "../other.safetensors"}, "no name of a file"),
        ({"w": "a\0.safetensors"}, "no name of a file"),
        ({"v": "a.safetensors"}, "has 'v', and it does not"),
        ([], "no index"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weights, why):
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path.parent / "other.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigurationError, match=why):
        open_safetensors(index)


def test_the_index_says_which_file_gives_a_tensor(tmp_path):
    save_file({"w": torch.ones(2), "more": torch.ones(1)}, tmp_path / "a.safetensors", {"head": "w", "most": "more"})
    save_file({"w": torch.zeros(2), "v": torch.ones(3)}, tmp_path / "b.safetensors", {"head": "w", "tied": "v"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors", "tied": "b.safetensors"}}))
    found = open_safetensors(index).components["model"]
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "w": [1, 1],
        "head": [1, 1],
        "v": [1, 1, 1],
        "tied": [1, 1, 1],
    }
    assert found["head"] is found["w"]
    assert found["tied"] is found["v"]


def test_an_index_that_is_deeper_or_larger_than_any_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="no index"):
        open_safetensors(index)
    os.truncate(index, 2 * 1024**3)
    with pytest.raises(ConfigurationError, match=r"cannot be read: it has more than 1073741824 bytes\.$"):
        open_safetensors(index)
    index.rename(tmp_path / ".metadata")
    with pytest.raises(ConfigurationError, match=r"cannot be read: it has more than 1073741824 bytes\.$"):
        open_dcp_folder(tmp_path, ())


def test_the_format_that_a_safetensors_file_notes_is_no_tie(tmp_path):
    save_file({"pt": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", "tied": "pt"})
    assert open_safetensors(tmp_path / "a.safetensors").components["model"].keys() == {"pt", "tied"}


def test_files_that_are_cut_short_or_old_are_refused_with_their_names(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:2000])
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    for name, why in (("cut.pt", "damaged"), ("old.pt", "before 1.6"), ("list.pt", "holds a list")):
        with pytest.raises(ConfigurationError, match=f"{name}.*{why}"):
            open_torch_file(tmp_path / name)
    save_file({"w": torch.ones(1000)}, tmp_path / "a.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=r"cut\.safetensors cannot be read"):
        open_safetensors(tmp_path / "cut.safetensors")


def test_a_torch_file_that_was_zipped_again_with_compression_is_refused(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    for name, method in (("again.pt", zipfile.ZIP_STORED), ("packed.pt", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / "a.pt") as whole, zipfile.ZipFile(tmp_path / name, "w", method) as copy:
            for record in whole.namelist():
                copy.writestr(record, whole.read(record))
        assert torch.equal(torch.load(tmp_path / name, weights_only=True)["w"], torch.ones(1000))
    assert torch.equal(open_torch_file(tmp_path / "again.pt").components["model"]["w"], torch.ones(1000))
    with pytest.raises(ConfigurationError, match=r"packed\.pt was compressed.*save it again"):
        open_torch_file(tmp_path / "packed.pt")


def test_a_tensor_that_repeats_what_its_file_has_is_taken_unless_it_is_huge(tmp_path):
    saved = {"net": {"w": torch.ones(2, 1).expand(2, 3)}}
    torch.save(saved, tmp_path / "a.pt")
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in (open_torch_file(tmp_path / "a.pt"), open_dcp_folder(tmp_path / "dcp", ())):
        assert torch.equal(read(source, source.components["net"]["w"]), torch.ones(2, 3))
    within: list = [{"w": (torch.ones(1).expand(2**40),)}]
    within.append(within)
    torch.save({"net": within}, tmp_path / "a.pt")
    with pytest.raises(ConfigurationError, match=r"a\.pt has a tensor.* \(1099511627776,\) that repeats 4 bytes"):
        open_torch_file(tmp_path / "a.pt")


def planned(loaded, *, only=(), **choices):
    return plan_import(SourceState(components_in(loaded)), Choices(only=frozenset(only), **choices))


def test_a_state_dict_is_a_model_and_all_else_a_value():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert {key: tree[0] for key, tree in planned(model.state_dict()).trees.items()} == {"model": "module"}
    assert {key: tree[0] for key, tree in planned(optimizer.state_dict()).trees.items()} == {"optimizer": "value"}
    whole = {"net": OrderedDict(model.state_dict()), "opt": optimizer.state_dict(), "step": 3, "best": torch.ones(1)}
    plan = planned(whole, renamed={"net": "model"}, only=["net", "step", "best"])
    assert {key: tree[0] for key, tree in plan.trees.items()} == {"model": "module", "step": "value", "best": "value"}
    assert sorted(plan.layout.tensors) == ["best/", "model/bias", "model/weight"]


def test_the_progress_moves_with_each_chunk_to_the_whole():
    plan = planned({"v": torch.ones(4_000_000), "w": torch.ones(4_000_000), "odd": torch.ones(1, dtype=torch.uint8)})
    read = []
    plan.digests(RunName("demo", "gpt"), 1, read.append)
    assert len(read) == 3
    assert sum(read) == plan.chunk_bytes


@pytest.mark.parametrize(
    ("loaded", "options", "why"),
    [
        ({"a": 1}, {"only": ["b"]}, "no component 'b'. Its components are 'a'"),
        ({"a": 1}, {"renamed": {"b": "c"}}, "no component 'b'"),
        ({"a": 1, "b": 2}, {"renamed": {"a": "b"}}, "Two of its components"),
        ({"v": torch.ones(2), "w": torch.zeros(2)}, {"tied": {"model/v": "model/w"}}, "different values"),
        ({"v": torch.ones(2), "w": torch.ones(1)}, {"tied": {"model/v": "model/w"}}, "different values"),
        ({"v": torch.ones(2)}, {"tied": {"model/v": "model/w"}}, "No model of it has both"),
        ({"a/b": 1}, {}, "'a/b' is not usable.*--rename"),
        ({1: 1}, {}, "is no text"),
        ({"a": {"w": torch.ones(2).to_sparse()}}, {}, "sparse"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_with_what_to_do(loaded, options, why):
    with pytest.raises(ConfigurationError, match=why):
        planned(loaded, **options)


def read(source: SourceState, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as an import reads it."""
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    found.reshape(-1).view(torch.uint8).numpy()[:] = np.concatenate(source.runs_of(tensor).arrays)
    return found


def read_whole(value, source: SourceState):
    match value:
        case torch.Tensor():
            return read(source, value)
        case dict():
            return {key: read_whole(each, source) for key, each in value.items()}
        case list():
            return [read_whole(each, source) for each in value]
    return value


@pytest.mark.parametrize("moments", [True, False])
def test_the_optimizer_of_a_dcp_folder_has_its_moments_at_the_parameters_again(tmp_path, moments):
    def made() -> torch.optim.Optimizer:
        params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        return torch.optim.AdamW(params) if moments else torch.optim.SGD(params)

    optimizer = made()
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = torch.full((2,), float(number))
    optimizer.step()
    saved = optimizer.state_dict()
    dcp.save({"optimizer": saved, "several": [saved]}, checkpoint_id=tmp_path, no_dist=True)
    source = open_dcp_folder(tmp_path, ())
    dcp.save(saved, checkpoint_id=tmp_path / "bare", no_dist=True)
    bare = open_dcp_folder(tmp_path / "bare", ())
    for found in (
        read_whole(source.components["optimizer"], source),
        read_whole(source.components["several"], source)[0],
        read_whole(bare.components["optimizer"], bare),
    ):
        other = made()
        other.load_state_dict(found)
        assert other.state_dict().keys() == saved.keys()
        assert other.state_dict()["param_groups"] == saved["param_groups"]
        assert list(other.state_dict()["state"]) == list(saved["state"]) == ([0, 1, 2] if moments else [])
        for number, slots in saved["state"].items():
            for name, tensor in slots.items():
                assert torch.equal(other.state_dict()["state"][number][name], tensor)


def test_a_dict_of_a_dcp_folder_that_is_no_optimizer_keeps_its_keys(tmp_path):
    state = {"named": {"state": {"w": {"m": 1}}, "param_groups": [{"params": ["w"]}]}, "other": {"state": {"0": 1}}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert open_dcp_folder(tmp_path, ()).components == state


def edit_metadata(folder: Path, change) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_dcp_folder_whose_pieces_do_not_make_a_tensor_whole_is_refused(tmp_path):
    whole = torch.arange(12.0).reshape(4, 3)
    saved = {"model": {"w": whole, "one": torch.tensor(5), "none": torch.ones(0, 2)}}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    source = open_dcp_folder(tmp_path, ())
    found = read_whole(source.components["model"], source)
    assert [found[name].tolist() for name in ("w", "one", "none")] == [whole.tolist(), 5, []]

    def of_pieces(*pieces):
        def change(metadata):
            metadata.state_dict_metadata["model.w"].chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in pieces
            ]

        return change

    for pieces, why in (
        ([], "do not make it whole"),
        ([((0, 0), (2, 3))], "do not make it whole"),
        ([((0, 0), (4, 3)), ((0, 0), (2, 3))], "do not make it whole"),
        ([((0, 0), (5, 3))], "lies outside"),
        ([((-1, 0), (4, 3))], "lies outside"),
        ([((0,), (4,))], "zip"),
    ):
        edit_metadata(tmp_path, of_pieces(*pieces))
        with pytest.raises(ConfigurationError, match=rf"\.metadata cannot be read: .*{why}"):
            open_dcp_folder(tmp_path, ())
    edit_metadata(tmp_path, of_pieces(((0, 0), (4, 3))))
    source = open_dcp_folder(tmp_path, ())
    assert torch.equal(read(source, source.components["model"]["w"]), whole)


def test_a_dcp_tensor_that_is_stored_with_another_dtype_than_its_metadata_says_is_refused(tmp_path):
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)

    def change(metadata):
        metadata.state_dict_metadata["model.w"].properties.dtype = torch.float16

    edit_metadata(tmp_path, change)
    source = open_dcp_folder(tmp_path, ())
    with pytest.raises(ConfigurationError, match=r"stored as torch\.float32, and the metadata says torch\.float16"):
        read(source, source.components["model"]["w"])


@pytest.mark.parametrize(
    ("size", "why"),
    [((2**60,), r"'model\.w' is larger than what its files can hold"), ((0, -1), "the size of 'model.w'")],
)
def test_a_dcp_tensor_that_is_larger_than_its_folder_is_refused(tmp_path, size, why):
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)

    def change(metadata):
        described = metadata.state_dict_metadata["model.w"]
        described.size = torch.Size(size)
        described.chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), described.size)]

    edit_metadata(tmp_path, change)
    with pytest.raises(ConfigurationError, match=why):
        open_dcp_folder(tmp_path, ())


def test_a_dcp_tensor_that_repeats_what_is_stored_is_refused(tmp_path):
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)

    def change(metadata):
        [[index, stored]] = metadata.storage_data.items()
        repeats = io.BytesIO()
        torch.save(torch.ones(1).expand(3), repeats)
        (tmp_path / stored.relative_path).write_bytes(repeats.getvalue())
        metadata.storage_data[index] = dataclasses.replace(stored, offset=0, length=len(repeats.getvalue()))

    edit_metadata(tmp_path, change)
    source = open_dcp_folder(tmp_path, ())
    with pytest.raises(ConfigurationError, match="repeats its elements"):
        read(source, source.components["model"]["w"])


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ({"model.w": 7}, "place of 'model.w'"),
        ({"model.w": ()}, "place of 'model.w'"),
        ({"model.w": (["model"], "w")}, "place of 'model.w'"),
        ({"model.w": ("w",) * 5000}, "place of 'model.w'"),
        ({"model.w": ("model",), "model.v": ("model", "v")}, "inside a value"),
    ],
)
def test_a_dcp_folder_whose_names_have_no_place_in_the_state_is_refused(tmp_path, places, why):
    dcp.save({"model": {"w": torch.ones(3), "v": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)
    edit_metadata(tmp_path, lambda metadata: setattr(metadata, "planner_data", places))
    with pytest.raises(ConfigurationError, match=rf"\.metadata cannot be read: .*{why}"):
        open_dcp_folder(tmp_path, ())


@pytest.mark.parametrize("path", ["/etc/hostname", "../other", "a\0b"])
def test_a_dcp_folder_that_names_a_file_outside_it_is_refused(tmp_path, path):
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)

    def change(metadata):
        for stored in metadata.storage_data.values():
            stored.relative_path = path

    edit_metadata(tmp_path, change)
    with pytest.raises(ConfigurationError, match="not in its folder"):
        open_dcp_folder(tmp_path, ())


@pytest.mark.parametrize(
    "named",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
        b"cpathlib\nPosixPath\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(K\x01tR",
    ],
    ids=["Metadata", "MetadataIndex", "PosixPath", "OrderedDict", "a function", "a member of an enum"],
)
@pytest.mark.parametrize(
    "state", [b"N}\x8c\x06parts_K\x01s\x86", b"}\x8c\x06parts_K\x01s"], ids=["by setattr", "in its dict"]
)
def test_the_metadata_of_a_dcp_folder_changes_no_class_and_nothing_that_lives_on(tmp_path, named, state):
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)
    honest = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(named + state + b"b0" + honest)
    with pytest.raises(ConfigurationError, match=r"\.metadata cannot be read: it sets attributes of"):
        open_dcp_folder(tmp_path, ())
    lasting = dcp.metadata.Metadata, dcp.metadata.MetadataIndex, dcp.metadata._MEM_FORMAT_ENCODING(1), type(tmp_path)
    assert not [each for each in (*lasting, torch.serialization._get_layout) if hasattr(each, "parts_")]
