"""No rule of a bucket touches what a checkpoint needs, nobody else gets in, and versions are kept."""

from __future__ import annotations

import pytest

from holdfast_service.records.history import FOLDER
from tests.terraform.modules import attributes, blocks, one, types

OLDER_ONLY = "${var.prefix}/" + FOLDER + "/"


def test_amazons_rules_touch_only_parts_of_uploads_and_older_versions_of_what_processes_remember() -> None:
    """What expires is lost to the checkpoints that share it; what is archived stops a launch for hours."""
    rules = [rule for each in blocks("aws", "aws_s3_bucket_lifecycle_configuration") for rule in each.body["rule"]]
    assert rules
    for rule in rules:
        actions = rule.keys() - {"id", "status", "filter"}
        if actions == {"abort_incomplete_multipart_upload"}:
            continue
        assert actions == {"noncurrent_version_expiration"}
        assert rule["filter"] == [{"prefix": OLDER_ONLY}]


def test_googles_rules_touch_only_parts_of_uploads_and_older_versions_of_what_processes_remember() -> None:
    rules = one("gcp", "google_storage_bucket")["lifecycle_rule"]
    assert rules
    for rule in rules:
        (action,), (condition,) = rule["action"], rule["condition"]
        if action == {"type": "AbortIncompleteMultipartUpload"}:
            continue
        assert action == {"type": "Delete"}
        assert condition.keys() == {"with_state", "days_since_noncurrent_time", "matches_prefix"}
        assert condition["with_state"] == "ARCHIVED"
        assert condition["matches_prefix"] == [OLDER_ONLY]


def test_what_others_delete_is_only_hidden() -> None:
    versioning = one("aws", "aws_s3_bucket_versioning")
    assert versioning["versioning_configuration"] == [{"status": "Enabled"}]
    assert one("gcp", "google_storage_bucket")["versioning"] == [{"enabled": True}]


def test_nothing_locks_every_upload() -> None:
    """The service refuses a bucket that does."""
    assert "aws_s3_bucket_object_lock_configuration" not in types("aws")
    bucket = one("gcp", "google_storage_bucket")
    assert not bucket.keys() & {"retention_policy", "default_event_based_hold", "enable_object_retention"}
    assert bucket["soft_delete_policy"] == [{"retention_duration_seconds": 0}]


def test_no_bucket_is_public_or_read_without_encryption() -> None:
    block = one("aws", "aws_s3_bucket_public_access_block")
    wanted = {"block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets"}
    assert {name for name, value in block.items() if value is True} == wanted
    (statement,) = one("aws", "aws_iam_policy_document", "encrypted_connections_only")["statement"]
    assert statement["effect"] == "Deny"
    assert statement["condition"] == [{"test": "Bool", "variable": "aws:SecureTransport", "values": ["false"]}]
    bucket = one("gcp", "google_storage_bucket")
    assert bucket["public_access_prevention"] == "enforced"
    assert bucket["uniform_bucket_level_access"] is True


def test_each_bucket_has_a_key_of_its_own_that_rotates() -> None:
    (rule,) = one("aws", "aws_s3_bucket_server_side_encryption_configuration")["rule"]
    (by_default,) = rule["apply_server_side_encryption_by_default"]
    assert by_default == {"sse_algorithm": "aws:kms", "kms_master_key_id": "${aws_kms_key.bucket.arn}"}
    assert one("aws", "aws_kms_key", "bucket")["enable_key_rotation"] is True
    bucket = one("gcp", "google_storage_bucket")
    assert bucket["encryption"] == [{"default_kms_key_name": "${google_kms_crypto_key.bucket.id}"}]
    assert one("gcp", "google_kms_crypto_key")["rotation_period"]


@pytest.mark.parametrize(
    ("cloud", "kinds"),
    [
        ("aws", ["aws_s3_bucket", "aws_kms_key", "aws_db_instance"]),
        ("gcp", ["google_storage_bucket", "google_kms_crypto_key", "google_sql_database_instance"]),
    ],
)
def test_terraform_destroys_nothing_that_checkpoints_need(cloud: str, kinds: list[str]) -> None:
    for each in blocks(cloud, *kinds):
        assert each.body["lifecycle"] == [{"prevent_destroy": True}], each.name
        assert each.body.get("force_destroy", False) is False


def test_a_replica_hides_nothing_and_is_no_store() -> None:
    (rule,) = one("aws", "aws_s3_bucket_replication_configuration")["rule"]
    assert rule["delete_marker_replication"] == [{"status": "Disabled"}]
    actions = [
        value
        for path, value in attributes(one("aws", "aws_iam_policy_document", "replication"))
        if path[-1] == "actions"
    ]
    assert not [action for each in actions for action in each if "Delete" in action]
    service = repr(one("aws", "aws_iam_policy_document", "service"))
    assert "replicas" not in service
    assert "module.second" not in service
