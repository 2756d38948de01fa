"""What a training job saved, by URL: the bytes of its tensors whatever ranks stored them, read by stock safetensors,
and one tensor for at most 1.2 times its bytes, counted at a real S3 server."""

from __future__ import annotations

import functools
import json
import secrets
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from safetensors import safe_open
from safetensors.torch import load
from tests.support.seaweedfs import SeaweedFS
from tests.support.serve import holdfast_serve
from tests.support.tcp_relay import TcpRelay, tcp_relay
from tests.support.training import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast_client.chunks.documents import CheckpointDocuments
from holdfast_client.client import Client
from holdfast_client.errors import StoreUnavailable
from holdfast_client.filesystem.fsspec_filesystem import HoldfastFileSystem
from holdfast_protocol.checkpoints import EditCheckpoint
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import Health

MIB = 1024**2
BIG = 8 * MIB
ODD = {
    "bf16": torch.randn(7, 3).to(torch.bfloat16),
    "fp8": torch.randn(5, 3).to(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
    "zero_d": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "columns": torch.randn(4, 6).t(),
    "big": torch.randn(1500, 1500),
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    """As the entry point does it where this package is installed."""
    fsspec.register_implementation("holdfast", HoldfastFileSystem, clobber=True)


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], TcpRelay]]:
    """A service with a store in S3, and the relay that all bytes of the store pass."""
    host, _, port = seaweedfs.endpoint.removeprefix("http://").rpartition(":")
    with tcp_relay(host, int(port)) as relay:
        store = seaweedfs.store_url_for(f"by-url-{secrets.token_hex(4)}").replace(f":{port}", f":{relay.port}")
        settings = {"HOLDFAST_STORE": store, **seaweedfs.environment}
        with holdfast_serve(tmp_path_factory.mktemp("service"), other_settings=settings) as running:
            yield running.environment, relay


@pytest.fixture
def relay(bucket: tuple[dict[str, str], TcpRelay], monkeypatch: pytest.MonkeyPatch) -> TcpRelay:
    for name, value in bucket[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "30")
    return bucket[1]


@pytest.fixture
def s3_run(relay: TcpRelay) -> str:
    with Client() as client:
        project = client.projects.edit(f"p{uuid.uuid4().hex}", EditProject())
        client.runs.create(project.name, "run")
    return f"{project.name}/run"


def save(run: str, state: dict, step: int = 1, **metrics: float) -> None:
    same_on_all_ranks = [name for name, value in state.items() if not isinstance(value, nn.Module)]
    with holdfast.Checkpointer(run, strict=True, replicated=same_on_all_ranks) as ckpt:
        ckpt.restore({})
        ckpt.save(step, state, metrics=metrics).committed.result(timeout=120)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    one, other = one.detach().contiguous(), other.detach().contiguous()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("store", ["posix", "s3"])
def test_stock_safetensors_reads_what_was_saved(
    store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = request.getfixturevalue("run" if store == "posix" else "s3_run")
    model = Tied()
    save(run, {"model": model, "odd": ODD, "notes": {"n": 1}}, loss=0.5)
    fs = HoldfastFileSystem()
    folder = f"{run}@best:loss"
    names = [name.rpartition("/")[2] for name in fs.ls(folder, detail=False)]
    assert names == ["checkpoint.json", "model.safetensors", "odd.safetensors"]
    odd = load(fs.cat_file(f"{folder}/odd.safetensors"))
    assert odd.keys() == ODD.keys()
    assert all(same(odd[name], tensor) for name, tensor in ODD.items())
    # A tool that needs a path gets a file of its own.
    path = fsspec.open_local(
        f"simplecache::holdfast://{folder}/model.safetensors", simplecache={"cache_storage": str(tmp_path)}
    )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert same(file.get_tensor("embed.weight"), model.embed.weight)
    facts = json.loads(fs.cat_file(f"{folder}/checkpoint.json"))
    assert (facts["step"], facts["tied"]) == (1, {"model/head.weight": "model/embed.weight"})
    assert facts["metrics"]["loss"]["value"] == 0.5


def test_sharded_tensors_are_whole_and_reading_ahead_fails_no_read(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, whose pieces are cut in no multiple of a chunk."""
    final = run_ranks(functools.partial(train, kind="fsdp", loader=False), 2, run, 3)[0].final
    fs = HoldfastFileSystem()
    whole = fs.cat_file(f"{run}@latest/model.safetensors")
    found = load(whole)
    assert found
    for name, tensor in found.items():
        assert tensor.numpy().tobytes() == final[name][2], name

    def away(*args: object) -> None:
        raise StoreUnavailable("The store is away")

    # A failed read leaves the position: whoever tries again must not go on behind bytes that nobody has got.
    fs.invalidate_cache()
    with fs.open(f"{run}@latest/model.safetensors") as file:
        begin = file.seek(8 + int.from_bytes(file.read(8), "little"))
        with monkeypatch.context() as other_rank:
            other_rank.setattr(CheckpointDocuments, "indexes", away)
            assert file.read(1) + file.read(1) == whole[begin : begin + 2]
            with pytest.raises(StoreUnavailable):
                file.read()
            assert file.tell() == begin + 2
        assert file.read() == whole[begin + 2 :]


@pytest.mark.parametrize("step_bytes", [BIG + 4, MIB], ids=["in one read", "in small steps"])
def test_one_tensor_costs_at_most_a_fifth_more_than_its_bytes_at_the_store(
    relay: TcpRelay, s3_run: str, step_bytes: int
) -> None:
    """Between others of its size, and beside a pack of small ones."""
    state = {f"layer{n}": torch.randn((BIG + 4) // 4) for n in range(4)} | {
        f"small{n}": torch.randn(9) for n in range(50)
    }
    save(s3_run, {"model": state})
    fs = HoldfastFileSystem()
    before = relay.answered_bytes
    with fs.open(f"{s3_run}@latest/model.safetensors") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell() + header["layer2"]["data_offsets"][0]
        file.seek(begin)
        content = b"".join(
            file.read(min(step_bytes, begin + BIG + 4 - file.tell())) for _ in range(-(-(BIG + 4) // step_bytes))
        )
    assert content == state["layer2"].numpy().tobytes()
    assert BIG <= relay.answered_bytes - before <= 1.2 * BIG
    # A small one costs its pack, once: the next ones cost nothing.
    begin_data = begin - header["layer2"]["data_offsets"][0]
    with fs.open(f"{s3_run}@latest/model.safetensors") as file:
        for number in range(2):
            first, last = header[f"small{number}"]["data_offsets"]
            file.seek(begin_data + first)
            assert file.read(last - first) == state[f"small{number}"].numpy().tobytes()
    assert relay.answered_bytes - before <= 1.2 * BIG + 100_000


def test_reading_ahead_stays_within_the_tensor_and_a_whole_file_costs_its_bytes_once(
    relay: TcpRelay, s3_run: str
) -> None:
    state = {f"layer{n}": torch.randn(20 * MIB // 4) for n in range(2)}
    sizes = holdfast.ChunkSizes(MIB, 4 * MIB, MIB)
    with holdfast.Checkpointer(s3_run, strict=True, chunk_sizes=sizes, replicated=["model"]) as ckpt:
        ckpt.restore({})
        ckpt.save(1, {"model": state}).committed.result(timeout=120)
    fs = HoldfastFileSystem()
    before = relay.answered_bytes
    with fs.open(f"{s3_run}@latest/model.safetensors") as file:
        file.read(int.from_bytes(file.read(8), "little"))
        read_ahead = threading.Event()
        fs._reader.parts.start(read_ahead.set)
        assert read_ahead.wait(60)
    assert relay.answered_bytes - before < MIB, "the header has cost a chunk"
    found = b""
    with fs.open(f"{s3_run}@latest/model.safetensors") as file:
        while part := file.read(MIB // 2):
            found += part
    assert all(same(load(found)[name], tensor) for name, tensor in state.items())
    assert 40 * MIB <= relay.answered_bytes - before <= 41 * MIB


def test_one_tensor_or_some_rows_as_safetensors_own_safe_open_gives_them(run: str, tmp_path: Path) -> None:
    model = Tied()
    save(run, {"model": model, "odd": ODD})
    url = f"holdfast://{run}@latest"
    for name in ("model", "odd"):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(HoldfastFileSystem().cat_file(f"{url}/{name}.safetensors"))
        with safe_open(path, "pt") as theirs, holdfast.safe_open(f"{url}/{name}.safetensors") as ours:
            assert (sorted(ours.keys()), ours.metadata()) == (sorted(theirs.keys()), theirs.metadata())
            assert ours.offset_keys() == theirs.offset_keys()
            for key in theirs.keys():
                assert same(ours.get_tensor(key), theirs.get_tensor(key)), key
                one, other = ours.get_slice(key), theirs.get_slice(key)
                assert (one.get_shape(), one.get_dtype()) == (other.get_shape(), other.get_dtype())
            assert ours.get_tensors().keys() == set(theirs.keys())
    with holdfast.safe_open(f"{url}/odd.safetensors") as file:
        big, whole = file.get_slice("big"), ODD["big"]
        for index in (
            slice(3, 7),
            (slice(-2, None), slice(0, 9)),
            (slice(0, 0),),
            5,
            (slice(None, None, 2), 1),
            (slice(4), 2),
        ):
            assert same(big[index], whole[index]), index
        assert file.get_slice("zero_d")[...] == ODD["zero_d"]
        assert same(big[()], whole)
        with pytest.raises(KeyError):
            file.get_tensor("none")
    for url_, framework, error in (
        (str(path), "pt", "no holdfast:// URL"),
        (f"{url}/odd.safetensors", "numpy", "framework='numpy'"),
        (f"{url}/checkpoint.json", "pt", "no file of tensors"),
    ):
        with pytest.raises(holdfast.errors.ConfigurationError, match=error):
            holdfast.safe_open(url_, framework=framework)


def test_stock_dcp_loads_by_url_without_a_checkpointer(service, run: str) -> None:
    model = Tied()
    save(run, {"model": model, "odd": ODD})
    attempts = service.client.runs.get(*run.split("/")).latest_attempt
    fresh = Tied()
    state = {"model": fresh.state_dict(), "odd": {"big": torch.zeros(1500, 1500)}}
    dcp.load(state, storage_reader=holdfast.dcp_reader(f"holdfast://{run}@latest"), no_dist=True)
    assert same(fresh.embed.weight, model.embed.weight)
    assert same(state["odd"]["big"], ODD["big"])
    assert service.client.runs.get(*run.split("/")).latest_attempt == attempts, "reading has opened an attempt"
    for url in (f"holdfast://{run}@latest/model.safetensors", "s3://bucket/x", f"holdfast://{run}@worst"):
        with pytest.raises(holdfast.errors.ConfigurationError):
            holdfast.dcp_reader(url)


def test_what_a_dcp_save_wrote_has_its_own_names_by_url(run: str) -> None:
    state = {"model": {"weight": torch.arange(12.0).view(3, 4)}, "epoch": 7, "list": [torch.ones(2)]}
    with holdfast.Checkpointer(run, strict=True) as ckpt:
        ckpt.restore({})
        dcp.save(state, storage_writer=ckpt.writer(1), no_dist=True)
        ckpt.wait()
    found = {"model": {"weight": torch.zeros(3, 4)}, "epoch": 0, "list": [torch.zeros(2)]}
    dcp.load(found, storage_reader=holdfast.dcp_reader(f"holdfast://{run}@1"), no_dist=True)
    assert found["epoch"] == 7
    assert same(found["list"][0], torch.ones(2))
    with holdfast.safe_open(f"holdfast://{run}@1/dcp.safetensors") as file:
        assert same(file.get_tensor("model.weight"), state["model"]["weight"])


def _load_sharded(rank: int, run: str) -> bytes:
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": {"weight": distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)])}}
    dcp.load(state, storage_reader=holdfast.dcp_reader(f"holdfast://{run}@latest"))
    return state["model"]["weight"].full_tensor().numpy().tobytes()


def test_two_ranks_load_by_url_what_one_has_saved(run: str) -> None:
    weight = torch.randn(9, 4)
    save(run, {"model": {"weight": weight}})
    assert run_ranks(_load_sharded, 2, run) == [weight.numpy().tobytes()] * 2


def test_who_loads_an_older_checkpoint_than_the_newest_hears_of_it(
    service, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tied()
    for step in (1, 2):
        save(run, {"model": model}, step)
    newest = service.client.checkpoints.select(*run.split("/"), "latest")
    edited = EditCheckpoint(health=Health.QUARANTINED, health_reason="a loss spike")
    service.client.checkpoints.edit(newest.id, edited, newest.etag)
    told = f"{run}@latest is step 1. Passed over: 2 (quarantined: a loss spike)."
    holdfast.load_weights(f"{run}@latest", Tied())
    assert caplog.text.count(told) == 1
    holdfast.dcp_reader(f"holdfast://{run}@latest").close()
    assert caplog.text.count(told) == 2


class OfUrl(Dataset):
    """Rows of a saved matrix, from one open file that the workers inherit."""

    def __init__(self, file, begin: int, columns: int) -> None:
        self.file, self.begin, self.columns = file, begin, columns

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> torch.Tensor:
        self.file.seek(self.begin + row * self.columns * 4)
        return torch.frombuffer(bytearray(self.file.read(self.columns * 4)), dtype=torch.float32)


def test_workers_of_a_data_loader_read_an_open_file(run: str) -> None:
    table = torch.randn(32, 64)
    save(run, {"table": {"rows": table}})
    with HoldfastFileSystem().open(f"{run}@latest/table.safetensors") as file:
        file.seek(int.from_bytes(file.read(8), "little") + 8)
        data = OfUrl(file, file.tell(), 64)
        rows = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert torch.equal(torch.cat(list(rows)), table)
        assert torch.equal(data[31], table[31])
