"""The service may make the calls that its stores make, and no others; a trainer may read its token."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast_service.stores
from tests.terraform.modules import TERRAFORM, attributes, blocks, files, one, types

STORES = Path(holdfast_service.stores.__file__).parent

# What each call takes. Sources: Amazon's "Actions, resources, and condition keys for Amazon S3", and Google's "IAM
# permissions for JSON methods".
S3 = {
    "list_objects_v2": {"s3:ListBucket"},
    "list_object_versions": {"s3:ListBucketVersions"},
    "get_object_lock_configuration": {"s3:GetBucketObjectLockConfiguration"},
    "head_object": {"s3:GetObject", "s3:GetObjectVersion"},
    "get_object": {"s3:GetObject", "s3:GetObjectVersion"},
    "put_object": {"s3:PutObject"},
    "copy_object": {"s3:GetObject", "s3:GetObjectVersion", "s3:PutObject"},
    "delete_object": {"s3:DeleteObject", "s3:DeleteObjectVersion"},
    "restore_object": {"s3:RestoreObject"},
    "put_object_legal_hold": {"s3:PutObjectLegalHold"},
}
GCS = {
    "upload_from_string": {"storage.objects.create", "storage.objects.delete"},
    "reload": {"storage.objects.get"},
    "download_as_bytes": {"storage.objects.get"},
    "download_to_file": {"storage.objects.get"},
    "delete": {"storage.objects.delete"},
    "list_blobs": {"storage.objects.list"},
}
ASKS_NOTHING = {"bucket", "blob", "close", "meta"}


def calls(store: str) -> Iterator[ast.Call]:
    for path in (STORES / store).glob("*.py"):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def operations_of_s3() -> set[str]:
    """boto3's names: what `ask` and `do` are given, and what is called on the client itself."""
    found: set[str] = set()
    for call in calls("s3"):
        match call:
            case ast.Call(func=ast.Attribute(attr="ask" | "do"), args=[ast.Constant(value=str(name)), *_]):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="client"), attr=name)):
                found.add(name)
    # What `S3Calls.ask` and `do` look up by name is what they are given; a session makes the client.
    return found - ASKS_NOTHING - {"session", "client"}


def operations_of_gcs() -> set[str]:
    """google-cloud-storage's names: what is called on its client, its bucket or one of its blobs."""
    found = set()
    for call in calls("gcs"):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="_client" | "_bucket"), attr=name)):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="blob"), attr=name)):
                found.add(name)
    return found - ASKS_NOTHING


def actions(body: Any) -> set[str]:
    return {each for path, value in attributes(body) if path[-1] == "actions" for each in value}


def test_the_role_at_amazon_has_what_the_store_calls_and_nothing_else() -> None:
    assert operations_of_s3() == S3.keys()
    wanted = set().union(*S3.values())
    # The bucket is encrypted: a PUT asks the key for a data key, a GET has it opened.
    assert actions(one("aws", "aws_iam_policy_document", "service")) == wanted | {"kms:Decrypt", "kms:GenerateDataKey"}


def test_the_role_at_google_has_what_the_store_calls_and_nothing_else() -> None:
    assert operations_of_gcs() == GCS.keys()
    roles = {each.name: set(each.body["permissions"]) for each in blocks("gcp", "google_project_iam_custom_role")}
    assert roles == {"stores": set().union(*GCS.values()), "signing": {"iam.serviceAccounts.signBlob"}}
    assert ":signBlob" in (STORES / "gcs/signer.py").read_text()


def test_no_role_is_a_wildcard() -> None:
    for each in blocks("aws", "aws_iam_policy_document"):
        for statement in (
            each.body.get("statement", []),
            *(d["statement"]["content"] for d in each.body.get("dynamic", []) if "statement" in d),
        ):
            for one_of in statement:
                if one_of.get("effect") != "Deny":
                    assert not [action for action in one_of["actions"] if "*" in action], each.name
                    assert one_of.get("resources") != ["*"], each.name


def test_google_gives_no_broad_role() -> None:
    granted = {
        str(value)
        for path in files("gcp")
        for kind in types("gcp")
        if "iam_member" in kind
        for each in blocks("gcp", kind)
        if each.file == path
        for name, value in attributes(each.body)
        if name[-1] in {"role", "for_each"}
    }
    named = set(re.findall(r"roles/[\w.]+", " ".join(granted)))
    assert named == {
        "roles/cloudkms.cryptoKeyEncrypterDecrypter",  # Cloud Storage's own account, on the bucket's key
        "roles/cloudsql.client",
        "roles/cloudsql.instanceUser",
        "roles/iam.workloadIdentityUser",
        "roles/secretmanager.secretAccessor",  # a trainer's, on its token
    }


def test_a_trainer_reads_its_token_and_nothing_else() -> None:
    assert actions(one("aws", "aws_iam_policy_document", "trainer")) == {"secretsmanager:GetSecretValue"}
    for each in blocks("gcp", "google_storage_bucket_iam_member", "google_service_account_iam_member"):
        assert "trainer" not in each.body["member"]
    assert "trainer" in one("gcp", "google_secret_manager_secret_iam_member")["member"]


def test_a_pod_takes_the_role_by_its_own_identity_and_no_key_is_made() -> None:
    trust = repr(one("aws", "aws_iam_policy_document", "service_trust"))
    assert "sts:AssumeRoleWithWebIdentity" in trust
    assert "system:serviceaccount:${var.eks.namespace}:${var.eks.service_account}" in trust
    member = one("gcp", "google_service_account_iam_member", "workload_identity")
    assert member["role"] == "roles/iam.workloadIdentityUser"
    assert not types("aws") & {"aws_iam_access_key", "aws_iam_user"}
    assert not types("gcp") & {"google_service_account_key", "google_storage_hmac_key"}


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_no_secret_stands_in_a_file(cloud: str) -> None:
    for kind in types(cloud):
        for each in blocks(cloud, kind):
            for path, value in attributes(each.body):
                if re.search("password|secret|token$|private_key", path[-1]) and isinstance(value, str):
                    assert value.startswith("${") or value in {"required"}, (each.kind, path)
    text = "".join(path.read_text(encoding="utf-8") for path in TERRAFORM.rglob("*") if path.is_file())
    assert not re.search(r"AKIA[0-9A-Z]{16}|hold_[0-9a-f]{16}|BEGIN [A-Z ]*PRIVATE KEY|AIza[0-9A-Za-z_-]{35}", text)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_each_variable_and_output_is_described(cloud: str) -> None:
    found = list(blocks(cloud, "variable", "output"))
    assert len(found) > 10
    for each in found:
        assert each.body.get("description", "").endswith("."), each.name
        assert each.kind == "output" or "type" in each.body, each.name
