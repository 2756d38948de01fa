# One bucket for checkpoints: versioned, closed, encrypted with a key of its own. Nothing here ever deletes, moves or
# archives what a checkpoint needs: the service does that itself, and a rule of the bucket knows nothing of what is shared.
terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.60, < 6"
    }
  }
}

variable "bucket" {
  description = "Its name."
  type        = string
}

variable "prefix" {
  description = "The folder in it that is Holdfast's."
  type        = string
}

variable "object_lock" {
  description = "Whether versions can be locked. Only at its making."
  type        = bool
}

resource "aws_kms_key" "bucket" {
  description             = "Checkpoints in ${var.bucket}. Without it none can be read."
  enable_key_rotation     = true
  deletion_window_in_days = 30

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket" "checkpoints" {
  bucket              = var.bucket
  object_lock_enabled = var.object_lock
  force_destroy       = false

  lifecycle {
    prevent_destroy = true
  }
}

# The service deletes each version that nothing needs, by its id. What anyone else deletes is only hidden.
resource "aws_s3_bucket_versioning" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_public_access_block" "checkpoints" {
  bucket                  = aws_s3_bucket.checkpoints.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.bucket.arn
    }
  }
}

# Two rules, and none of them touches what is current. Holdfast makes no multipart uploads: the parts are others'. Below
# history/ each process writes one small file again and again; only older versions of these go.
resource "aws_s3_bucket_lifecycle_configuration" "checkpoints" {
  bucket     = aws_s3_bucket.checkpoints.id
  depends_on = [aws_s3_bucket_versioning.checkpoints]

  rule {
    id     = "parts-of-uploads-that-were-given-up"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  rule {
    id     = "older-versions-of-what-processes-remember"
    status = "Enabled"

    filter {
      prefix = "${var.prefix}/history/"
    }

    noncurrent_version_expiration {
      noncurrent_days = 7
    }
  }
}

data "aws_iam_policy_document" "encrypted_connections_only" {
  statement {
    sid       = "EncryptedConnectionsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.checkpoints.arn, "${aws_s3_bucket.checkpoints.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "checkpoints" {
  bucket     = aws_s3_bucket.checkpoints.id
  policy     = data.aws_iam_policy_document.encrypted_connections_only.json
  depends_on = [aws_s3_bucket_public_access_block.checkpoints]
}

output "arn" {
  description = "The bucket's."
  value       = aws_s3_bucket.checkpoints.arn
}

output "name" {
  description = "The bucket's, once it keeps versions."
  value       = aws_s3_bucket_versioning.checkpoints.bucket
}

output "key_arn" {
  description = "Of the KMS key that encrypts it."
  value       = aws_kms_key.bucket.arn
}
