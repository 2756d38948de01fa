module "first" {
  source      = "./bucket"
  bucket      = var.bucket
  prefix      = var.prefix
  object_lock = var.object_lock
}

module "second" {
  count       = var.second == null ? 0 : 1
  source      = "./bucket"
  bucket      = var.second.bucket
  prefix      = var.prefix
  object_lock = var.object_lock

  providers = {
    aws = aws.second
  }
}

locals {
  replicas = try(var.second.use, "") == "replica" ? [module.second[0]] : []
  # What the service reads and writes. A replica is S3's to write and nobody's to delete.
  stores = concat([module.first], try(var.second.use, "") == "store" ? [module.second[0]] : [])
}

data "aws_iam_policy_document" "replication_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["s3.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "replication" {
  count = length(local.replicas)

  statement {
    sid       = "Source"
    actions   = ["s3:GetReplicationConfiguration", "s3:ListBucket"]
    resources = [module.first.arn]
  }

  statement {
    sid       = "SourceVersions"
    actions   = ["s3:GetObjectVersionForReplication", "s3:GetObjectVersionAcl", "s3:GetObjectVersionTagging", "s3:GetObjectRetention", "s3:GetObjectLegalHold"]
    resources = ["${module.first.arn}/*"]
  }

  statement {
    sid       = "Replica"
    actions   = ["s3:ReplicateObject", "s3:ReplicateTags"]
    resources = ["${local.replicas[0].arn}/*"]
  }

  statement {
    sid       = "ReadEncrypted"
    actions   = ["kms:Decrypt"]
    resources = [module.first.key_arn]
  }

  statement {
    sid       = "WriteEncrypted"
    actions   = ["kms:Encrypt", "kms:GenerateDataKey"]
    resources = [local.replicas[0].key_arn]
  }
}

resource "aws_iam_role" "replication" {
  count              = length(local.replicas)
  name               = "${var.name}-replication"
  assume_role_policy = data.aws_iam_policy_document.replication_trust.json
}

resource "aws_iam_role_policy" "replication" {
  count  = length(local.replicas)
  name   = "replicate"
  role   = aws_iam_role.replication[0].id
  policy = data.aws_iam_policy_document.replication[0].json
}

resource "aws_s3_bucket_replication_configuration" "first" {
  count      = length(local.replicas)
  bucket     = module.first.name
  role       = aws_iam_role.replication[0].arn
  depends_on = [aws_iam_role_policy.replication]

  rule {
    id     = "everything"
    status = "Enabled"

    filter {}

    # Who deletes in the first bucket, by mistake or with stolen keys, hides nothing here.
    delete_marker_replication {
      status = "Disabled"
    }

    source_selection_criteria {
      sse_kms_encrypted_objects {
        status = "Enabled"
      }
    }

    destination {
      bucket = local.replicas[0].arn

      encryption_configuration {
        replica_kms_key_id = local.replicas[0].key_arn
      }
    }
  }
}
