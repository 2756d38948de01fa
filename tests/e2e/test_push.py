"""`holdfast checkpoints push`: the files of a pull in a bucket of a real S3 server, which a killed push has begun and
the next one ends; no half of it is taken for whole."""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.export.hf.folder import HfChoices
from holdfast.export.pull import Format
from holdfast.export.push import NotSent, push
from holdfast_client import Client
from holdfast_client.cli.main import app
from holdfast_protocol.base import RunName
from holdfast_protocol.runs import Latest, parse_point
from tests.support.forked import fork_server
from tests.support.hf_models import config_of, gpt2, save, train
from tests.support.s3_folder import S3Folder
from tests.support.seaweedfs import SeaweedFS


@pytest.fixture
def bucket(seaweedfs: SeaweedFS, monkeypatch) -> str:
    """A folder of its own in it."""
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs.endpoint)
    fsspec.register_implementation("bucket3", S3Folder, clobber=True)
    monkeypatch.setattr(S3Folder, "sent", [])
    return f"bucket3://{seaweedfs.bucket}/models-{secrets.token_hex(4)}"


def pushed(client: Client, run: RunName, url: str, format_: Format = Format.HF, **choices: Any) -> dict[str, Any]:
    hf = HfChoices(**{name: choices.pop(name) for name in ("config", "most_file_bytes") if name in choices})
    return push(
        client, run, choices.pop("point", Latest()), url, format_, hf=hf if format_ is Format.HF else None, **choices
    )


def names_at(url: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).lstrip("/") for path in fs.find(root)}


def downloaded(url: str, folder: Path) -> Path:
    fs, root = fsspec.core.url_to_fs(url)
    folder.mkdir()
    for path in fs.find(root):
        (folder / path.rpartition("/")[2]).write_bytes(fs.cat_file(path))
    return folder


def test_a_model_is_in_the_bucket_as_from_pretrained_opens_it_and_a_second_push_sends_nothing(
    run, client, bucket, tmp_path
):
    model = gpt2()
    train(model)
    save(run, {"model": model})
    config = config_of(model, tmp_path / "config")
    first = pushed(client, run, bucket, config=config, most_file_bytes=10_000)
    assert first["kept"] == []
    assert names_at(bucket) == set(first["sent"])
    assert first["sent"][-3:] == ["config.json", "model.safetensors.index.json", "checkpoint.json"]
    found = AutoModelForCausalLM.from_pretrained(downloaded(bucket, tmp_path / "out"), local_files_only=True)
    assert all(torch.equal(found.state_dict()[name], each) for name, each in model.state_dict().items())
    again = pushed(client, run, bucket, config=config, most_file_bytes=10_000)
    assert (again["sent"], sorted(again["kept"])) == ([], sorted(first["sent"]))


def test_a_push_that_broke_off_is_no_model_yet_and_the_next_one_sends_the_rest(
    run, client, bucket, tmp_path, monkeypatch
):
    model = gpt2()
    save(run, {"model": model})
    config = config_of(model, tmp_path / "config")
    with monkeypatch.context() as broken:
        broken.setattr(S3Folder, "fail_at", "00002-of-00004.safetensors")
        with pytest.raises(NotSent, match=r"00002-of-.*the connection broke off.*same command again") as told:
            pushed(client, run, bucket, config=config, most_file_bytes=10_000)
    assert "secret" not in str(told.value)
    assert "abc" not in str(told.value)
    there = names_at(bucket) - {".holdfast-push.json"}
    assert "model-00001-of-00004.safetensors" in there
    assert not {"config.json", "checkpoint.json", "model-00002-of-00004.safetensors"} & there
    done = pushed(client, run, bucket, config=config, most_file_bytes=10_000)
    assert set(done["kept"]) == there
    assert names_at(bucket) == {*done["kept"], *done["sent"]}
    # A byte that rotted there is found by the next one.
    fs, root = fsspec.core.url_to_fs(bucket)
    content = fs.cat_file(f"{root}/model-00003-of-00004.safetensors")
    with fs.open(f"{root}/model-00003-of-00004.safetensors", "wb") as file:
        file.write(content[:-1] + bytes([content[-1] ^ 1]))
    mended = pushed(client, run, bucket, config=config, most_file_bytes=10_000)
    assert mended["sent"][0] == "model-00003-of-00004.safetensors"
    assert fs.cat_file(f"{root}/model-00003-of-00004.safetensors") == content


def test_another_checkpoint_or_foreign_files_there_are_left_unless_that_is_meant(run, client, tmp_path):
    with holdfast.Checkpointer(str(run), strict=True) as ckpt:
        ckpt.restore({})
        for step in (1, 2):
            ckpt.save(step, {"model": {"w": torch.full((3,), float(step))}, "n": step}).committed.result(timeout=60)
    url = f"file://{tmp_path}/shelf/gpt"
    pushed(client, run, url, Format.SAFETENSORS, point=parse_point("1"))
    (tmp_path / "shelf" / "gpt" / "readme.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"has step 1 of tests/.* as safetensors.*--force"):
        pushed(client, run, url, Format.SAFETENSORS)
    with pytest.raises(ConfigurationError, match=r"has step 1 of tests/.* as safetensors.*--force"):
        pushed(client, run, url, Format.TORCH, point=parse_point("1"))
    with pytest.raises(ConfigurationError, match=r"1 file not of this push, such as 'readme.txt'"):
        pushed(client, run, url, Format.SAFETENSORS, point=parse_point("1"))
    done = pushed(client, run, url, Format.TORCH, force=True)
    assert names_at(url) == {*done["sent"], *done["kept"], "readme.txt"}
    assert torch.load(tmp_path / "shelf" / "gpt" / "model@0.pt", weights_only=True)["w"][0] == 2
    assert json.loads((tmp_path / "shelf" / "gpt" / "checkpoint.json").read_text())["step"] == 2


class Broken(S3Folder):
    """A connection that breaks off."""

    protocol = "broken3"
    calls = "/"
    """The end of the path that it cannot remove, or `ls`."""

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        if Broken.calls == "ls":
            raise ConnectionError("the connection broke off")
        return super().ls(path, detail, **kwargs)

    def rm_file(self, path: str) -> None:
        if path.endswith(Broken.calls):
            raise ConnectionError("the connection broke off")
        super().rm_file(path)


def test_no_file_of_the_last_push_is_left_beside_a_new_index_wherever_a_push_is_killed(
    run, client, bucket, tmp_path, monkeypatch
):
    """from_pretrained() prefers model.safetensors to an index."""
    model = gpt2()
    with holdfast.Checkpointer(str(run), strict=True) as ckpt:
        ckpt.restore({})
        for step in (1, 2):
            train(model)
            ckpt.save(step, {"model": model}).committed.result(timeout=180)
    config = config_of(model, tmp_path / "config")
    pushed(client, run, bucket, config=config, point=parse_point("1"))
    assert "model.safetensors" in names_at(bucket)
    fsspec.register_implementation("broken3", Broken, clobber=True)
    broken = bucket.replace("bucket3", "broken3")
    for at in ("config.json", "model.safetensors", "checkpoint.json", ".holdfast-push.json"):
        with monkeypatch.context() as breaking:
            breaking.setattr(Broken, "calls", at)
            with pytest.raises(NotSent, match="the connection broke off"):
                pushed(client, run, broken, config=config, most_file_bytes=10_000, force=True)
        there = names_at(bucket)
        assert "model.safetensors" not in there or "config.json" not in there or at == "config.json"
    # The last one lacks only the end of its own list: it needs no --force.
    done = pushed(client, run, bucket, config=config, most_file_bytes=10_000)
    assert (done["sent"], names_at(bucket)) == ([], set(done["kept"]))
    found = AutoModelForCausalLM.from_pretrained(downloaded(bucket, tmp_path / "out"), local_files_only=True)
    assert all(torch.equal(found.state_dict()[name], each) for name, each in model.state_dict().items())


def test_force_leaves_no_foreign_weights_that_would_be_loaded_in_place_of_the_pushed_ones(run, client, tmp_path):
    model, place = gpt2(), tmp_path / "gpt"
    train(model)
    save(run, {"model": model})
    config = config_of(gpt2(), tmp_path / "config")
    gpt2().save_pretrained(place)
    for name in ("model-00001-of-00009.safetensors", "adapter_config.json", "readme.txt"):
        (place / name).write_text("mine")
    notes: list[str] = []
    choices = {"config": config, "most_file_bytes": 10_000}
    with pytest.raises(ConfigurationError, match="not of this push"):
        pushed(client, run, f"file://{place}", **choices)
    done = pushed(client, run, f"file://{place}", **choices, force=True, on_note=notes.append)
    assert names_at(f"file://{place}") >= {*done["sent"], *done["kept"], "readme.txt"}
    assert "model.safetensors is removed: it is not of this push." in notes
    found = AutoModelForCausalLM.from_pretrained(place, local_files_only=True)
    assert all(torch.equal(found.state_dict()[name], each) for name, each in model.state_dict().items())


def saved_steps(run: RunName) -> None:
    with holdfast.Checkpointer(str(run), strict=True) as ckpt:
        ckpt.restore({})
        for step in (1, 2):
            ckpt.save(step, {"model": {"w": torch.full((3,), float(step))}}).committed.result(timeout=60)


def test_another_model_of_the_same_file_names_is_not_overwritten(run, client, tmp_path):
    saved_steps(run)
    url = f"file://{tmp_path}/gpt"
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "model@0.safetensors").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"1 file not of this push, such as 'model@0.safetensors'"):
        pushed(client, run, url, Format.SAFETENSORS)
    assert (tmp_path / "gpt" / "model@0.safetensors").read_text() == "mine"
    (tmp_path / "gpt" / "checkpoint.json").write_text('["mine"]')
    with pytest.raises(ConfigurationError, match=r"checkpoint.json at .* is not of Holdfast"):
        pushed(client, run, url, Format.SAFETENSORS, force=True)


def test_a_selector_that_names_another_checkpoint_by_the_time_of_the_pull_replaces_nothing(
    run, client, tmp_path, monkeypatch
):
    saved_steps(run)
    url = f"file://{tmp_path}/gpt"
    pushed(client, run, url, Format.SAFETENSORS, point=parse_point("1"))
    chosen = client.restores.restore_point

    asked: list[str] = []

    def first_the_older(project: str, name: str, selector: str) -> Any:
        asked.append(selector)
        return chosen(project, name, "1" if len(asked) == 1 else selector)

    monkeypatch.setattr(client.restores, "restore_point", first_the_older)
    with pytest.raises(ConfigurationError, match=r"has step 1 of tests/.* as safetensors.*--force"):
        pushed(client, run, url, Format.SAFETENSORS)
    assert json.loads((tmp_path / "gpt" / "checkpoint.json").read_text())["step"] == 1


def test_of_two_pushes_to_one_place_the_first_ends_without_a_word_of_success(run, client, tmp_path):
    saved_steps(run)
    url = f"file://{tmp_path}/gpt"
    others = []

    def other(note: str) -> None:
        if not others:
            others.append(pushed(client, run, url, Format.SAFETENSORS, point=parse_point("2"), force=True))

    with pytest.raises(NotSent, match="Another push has begun"):
        pushed(client, run, url, Format.SAFETENSORS, point=parse_point("1"), on_note=other)
    assert names_at(url) == {*others[0]["sent"], *others[0]["kept"]}
    again = pushed(client, run, url, Format.SAFETENSORS, point=parse_point("2"))
    assert again["sent"] == []


def test_a_place_that_cannot_be_listed_is_not_taken_for_an_empty_one(run, client, bucket, monkeypatch):
    saved_steps(run)
    fsspec.register_implementation("broken3", Broken, clobber=True)
    monkeypatch.setattr(Broken, "calls", "ls")
    with pytest.raises(NotSent, match="could not be listed: the connection broke off"):
        pushed(client, run, bucket.replace("bucket3", "broken3"), Format.TORCH)
    assert names_at(bucket) == set()


def killed_push(environment: dict[str, str], run: RunName, url: str, work: Path) -> None:
    os.environ.update(environment)
    with Client() as client:
        push(
            client,
            run,
            Latest(),
            url,
            Format.TORCH,
            work=work,
            on_bytes=lambda count: os.kill(os.getpid(), signal.SIGKILL),
        )


def test_the_files_of_a_killed_push_on_this_machine_are_private_and_removed_by_the_next(run, client, served, tmp_path):
    saved_steps(run)
    url, work = f"file://{tmp_path}/gpt", tmp_path / "work"
    work.mkdir()
    process = fork_server().Process(target=killed_push, args=(served.environment, run, url, work), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    [left] = work.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    pushed(client, run, url, Format.TORCH, work=work)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://key:topsecret@bucket/gpt", "leave credentials to the environment"),
        ("s3://:topsecret@bucket/gpt", "leave credentials to the environment"),
        ("s3://key:top/topsecret@bucket/gpt", "leave credentials to the environment"),
        ("s3://[topsecret/gpt", "leave credentials to the environment"),
        ("s3://bucket/gpt?token=topsecret", "leave credentials to the environment"),
        ("out/gpt", "is not the URL of a folder"),
        ("nowhere://bucket/gpt", "cannot be opened"),
        ("hf://org/model", "hf upload"),
        ("holdfast://demo/gpt", "Nothing is pushed to holdfast://"),
    ],
)
def test_a_place_that_cannot_take_it_is_told_before_anything_is_fetched(run, client, url, told):
    with pytest.raises(ConfigurationError, match=told) as refused:
        pushed(client, run, url)
    assert "topsecret" not in str(refused.value)


def test_the_command_says_what_it_sent(run, client, tmp_path):
    with holdfast.Checkpointer(str(run), strict=True) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"model": {"w": torch.ones(3)}}).committed.result(timeout=60)
    url = f"file://{tmp_path}/gpt"
    done = CliRunner().invoke(app, ["checkpoints", "push", f"{run}@1", url])
    assert done.exit_code == 0, done.output
    assert f"{run}@1#1 is at {url}, as torch: 4 files sent, 0 there already." in done.output
    again = CliRunner().invoke(app, ["checkpoints", "push", f"{run}@1", url])
    assert "0 files sent, 4 there already." in again.output
