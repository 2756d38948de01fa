"""Files that this machine's user or operator gives to Holdfast, spoilt or hostile: the spool's records, the identity
file, what `holdfast admin restore` restores, and the safetensors files that are imported."""

from __future__ import annotations

import io
import json
import zipfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from safetensors.torch import save

from holdfast.imports.safetensors_weights import open_safetensors
from holdfast_client.errors import ConfigurationError
from holdfast_client.local.spool import SpooledChunk, SpoolRecord, decode_record, saves_of
from holdfast_protocol.checkpoints import IndexOrdinals
from holdfast_protocol.digests import DocumentError, canonical_bytes, chunk_digest
from holdfast_protocol.states import CheckpointKind
from holdfast_service.backup.document import CATALOG, MANIFEST, BackupRefusedError
from holdfast_service.backup.restore import restore_backup
from holdfast_service.backup.write import write_backup
from holdfast_service.errors import ProblemError
from holdfast_service.identity.rules import IdentityFileError, decide, grants_of, parse_rules
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from tests.fuzz.mutations import JSON, altered, damaged

often = settings(max_examples=1000)

RECORD = SpoolRecord(
    project="demo",
    run="gpt",
    epoch=1,
    attempt=2,
    launch_id="launch-1",
    number=3,
    step=20,
    kind=CheckpointKind.PERIODIC,
    world_size=2,
    rank=0,
    chunks=[SpooledChunk(digest="ab" * 32, bytes=4096, item_bytes=4)],
    index=IndexOrdinals(shard=0, layout=None),
    components={},
    host="node-1",
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)


@often
@given(altered(json.loads(RECORD.encode())), st.booleans())
def test_a_record_of_the_spool_is_read_or_refused(outer: Any, signs: bool) -> None:
    """`signs`: who alters it writes the digest anew."""
    if signs:
        outer["sha256"] = chunk_digest(canonical_bytes(outer.get("record")))
    with suppress(DocumentError):
        found = decode_record(canonical_bytes(outer))
        assert decode_record(found.encode()) == found, "what is read can be written again"
        assert "/" not in found.name
        assert saves_of([found])[0].records == (found,)


@often
@given(damaged([RECORD.encode()]) | st.binary(max_size=200))
def test_damaged_bytes_of_a_record_of_the_spool_are_refused(data: bytes) -> None:
    with suppress(DocumentError):
        assert decode_record(data) == RECORD


IDENTITY = {
    "providers": [
        {"name": "cluster", "issuer": "https://cluster.example.org", "audiences": ["holdfast"]},
        {"name": "people", "issuer": "https://sso.example.org", "client_id": "page", "clock_skew_seconds": 30},
    ],
    "rules": [
        {
            "name": "trainers",
            "provider": "cluster",
            "claims": {"sub": "system:serviceaccount:*:trainer", "admin": False},
            "role": "trainer",
            "projects": ["demo"],
            "longest_seconds": 600,
        },
        {"name": "all", "provider": "people", "everyone": True, "role": "reader", "every_project": True},
    ],
}
YAML = [
    yaml.safe_dump(IDENTITY).encode(),
    b"providers: [{name: a, issuer: !!str x, at: 2026-01-01T00:00:00+01:00}]\n",
    b"a: !!timestamp x\nb: !!int ''\nc: !!bool x\nd: !!binary x\ne: !!set {a}\nf: 1:30:30.5\ng: &h [0x1f, .inf]\n",
]


def judged(content: bytes) -> None:
    with suppress(IdentityFileError):
        rules = parse_rules(content)
        for provider in rules.providers:
            with suppress(ProblemError):
                decide(grants_of(rules, provider, {"sub": "system:serviceaccount:a:trainer", "groups": ["x"]}))


@often
@given(altered(IDENTITY) | JSON)
def test_an_identity_file_is_read_or_refused(document: Any) -> None:
    judged(yaml.safe_dump(document).encode())


@often
@given(
    damaged(YAML) | st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
@example(b"a: !!timestamp x")
@example(b"a: !!int ''")
@example(b"a: !!bool x")
@example(b"a: " + b"1:" * 200 + b"1.5")
@example(b"a: " + b"1:" * 500_000 + b"1")
@example(b"[" * 5000)
@example(b"\xff\xfe\x00\xd8")
def test_damaged_bytes_of_an_identity_file_are_read_or_refused(content: bytes) -> None:
    judged(content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The members of a backup of a new catalog."""
    folder = tmp_path_factory.mktemp("backup")
    context = open_service(of(folder / "catalog.db"))
    try:
        write_backup(context.database, folder / "backup.zip", plain_secrets=True)
    finally:
        close_service(context)
    with zipfile.ZipFile(folder / "backup.zip") as archive:
        return {name: archive.read(name) for name in (CATALOG, MANIFEST)}


def of(catalog: Path) -> ServiceSettings:
    url, store = SecretStr(f"sqlite:///{catalog}"), f"posix://{catalog.parent / 'store'}"
    return ServiceSettings(database_url=url, data_dir=catalog.parent, store=store)


def packed(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def restore(content: bytes) -> None:
    """It is restored, or refused with nothing left."""
    with TemporaryDirectory() as folder:
        backup, catalog = Path(folder) / "backup.zip", Path(folder) / "restored" / "catalog.db"
        backup.write_bytes(content)
        with suppress(BackupRefusedError, ProblemError):
            assert restore_backup(of(catalog), backup) > 0
            catalog.unlink()
        assert not catalog.parent.exists() or not list(catalog.parent.iterdir())


@given(data=st.data())
def test_a_backup_whose_members_were_altered_is_restored_or_refused(whole: dict[str, bytes], data: Any) -> None:
    """By who packs them anew, so that all checksums fit."""
    members = dict(whole)
    match data.draw(st.sampled_from(["manifest", "bytes of the manifest", "catalog", "left out"])):
        case "manifest":
            members[MANIFEST] = json.dumps(data.draw(altered(json.loads(whole[MANIFEST])) | JSON)).encode()
        case "bytes of the manifest":
            members[MANIFEST] = data.draw(damaged([whole[MANIFEST], b"[" * 100_000]))
        case "catalog":
            members[CATALOG] = data.draw(damaged([whole[CATALOG], b"", b"SQLite format 3\0"]))
        case _:
            del members[data.draw(st.sampled_from(sorted(members)))]
    restore(packed(members))


@settings(max_examples=300)
@given(data=st.data(), method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]))
def test_a_spoilt_file_of_a_backup_is_refused(whole: dict[str, bytes], data: Any, method: int) -> None:
    """Its catalog is small, so that its heads and its index are spoilt often."""
    small = packed(whole | {CATALOG: b"no catalog"}, method)
    restore(data.draw(damaged([small]) | st.binary(max_size=200)))


@pytest.mark.parametrize(("at_local", "at_central", "value"), [(6, 8, 1), (8, 10, 14), (8, 10, 12), (8, 10, 99)])
def test_a_head_that_says_what_is_not_so_is_refused(
    whole: dict[str, bytes], at_local: int, at_central: int, value: int
) -> None:
    """Encrypted, or compressed in another way."""
    content = bytearray(packed(whole))
    for signature, at in ((b"PK\3\4", at_local), (b"PK\1\2", at_central)):
        start = content.find(signature)
        while start >= 0:
            content[start + at] = value
            start = content.find(signature, start + 4)
    restore(bytes(content))


FILES = [
    save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"format": "pt", "tied": "a"}),
    save({"a": torch.ones(0)}),
]
HEADER = {
    "__metadata__": {"format": "pt", "tied": "a"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DTYPES = ("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "C64", "U16", "U64", "F64")
INDEX = {"metadata": {"total_size": 32}, "weight_map": {"a": "model.safetensors", "tied": "model.safetensors"}}


def imported(files: dict[str, bytes], first: str) -> None:
    """Its tensors lie within the file; or it is refused, or one that is missing is told by its name."""
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        with suppress(ConfigurationError, OSError):
            for tensor in open_safetensors(Path(folder) / first).components["model"].values():
                assert tensor.nbytes <= len(files["model.safetensors"])


@often
@given(damaged(FILES) | st.binary(max_size=200))
@example(b"\xff" * 8)
@example((2**62).to_bytes(8, "little") + b"{}")
@example((100_000).to_bytes(8, "little") + b"[" * 100_000)
def test_damaged_bytes_of_a_safetensors_file_are_read_or_refused(content: bytes) -> None:
    imported({"model.safetensors": content}, "model.safetensors")


@often
@given(altered(HEADER) | JSON, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 64))
def test_the_header_of_a_safetensors_file_is_read_or_refused(header: Any, dtype: str, other: bool, size: int) -> None:
    """`other`: with a tensor of a rarer dtype behind the rest."""
    if other and isinstance(header, dict):
        header["c"] = {"dtype": dtype, "shape": [size - 32], "data_offsets": [32, size]}
    head = json.dumps(header).encode()
    content = len(head).to_bytes(8, "little") + head + bytes(size)
    imported({"model.safetensors": content}, "model.safetensors")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_safetensors_file_of_any_dtype_is_read_or_refused(dtype: str) -> None:
    head = json.dumps({"a": {"dtype": dtype, "shape": [size := 16], "data_offsets": [0, bits(dtype) * size // 8]}})
    content = len(head).to_bytes(8, "little") + head.encode() + bytes(bits(dtype) * size // 8)
    imported({"model.safetensors": content}, "model.safetensors")


def bits(dtype: str) -> int:
    return 8 if dtype == "BOOL" else int(dtype.lstrip("UIFC").partition("_")[0])


@often
@given(
    altered(INDEX).map(lambda index: json.dumps(index).encode())
    | damaged([json.dumps(INDEX).encode()])
    | st.sampled_from(["", ".", "..", "\0", "\ud800", "x" * 300, "model.safetensors.index.json"]).map(
        lambda name: json.dumps({"weight_map": {"a": name}}).encode()
    )
)
@example(b'{"weight_map": ' + b"[" * 100_000)
def test_the_index_of_safetensors_files_is_read_or_refused(content: bytes) -> None:
    index = "model.safetensors.index.json"
    imported({"model.safetensors": FILES[0], index: content}, index)
