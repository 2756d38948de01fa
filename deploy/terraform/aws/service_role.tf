# What the service may do: the calls that service/holdfast_service/stores/s3 makes, and no other. A test compares the two.
# Trainers need none of it: they send and read by URLs that this role has signed.
data "aws_iam_policy_document" "service" {
  # list_objects_v2 and list_object_versions (listings, ping, clock, deleting every version of a name). No condition on
  # the prefix: without ListBucket S3 answers 403 and not 404 for an object that is missing, and that must be told apart.
  # get_object_lock_configuration: a bucket with a default retention is refused.
  statement {
    sid       = "Buckets"
    actions   = ["s3:ListBucket", "s3:ListBucketVersions", "s3:GetBucketObjectLockConfiguration"]
    resources = local.stores[*].arn
  }

  statement {
    sid = "Objects"
    actions = [
      "s3:GetObject",           # head_object, get_object, a trainer's GET, the source of copy_object
      "s3:GetObjectVersion",    # the same, of a version
      "s3:PutObject",           # put_object, a trainer's PUT, the target of copy_object
      "s3:DeleteObject",        # delete_object
      "s3:DeleteObjectVersion", # delete_object of a version: the bucket keeps versions
      "s3:RestoreObject",       # restore_object: the thaw of a policy of kind `tiers`
    ]
    resources = [for each in local.stores : "${each.arn}/${var.prefix}/*"]
  }

  # put_object_legal_hold: `holdfast holds create --mirror`.
  dynamic "statement" {
    for_each = var.object_lock ? [1] : []

    content {
      sid       = "Holds"
      actions   = ["s3:PutObjectLegalHold"]
      resources = [for each in local.stores : "${each.arn}/${var.prefix}/*"]
    }
  }

  statement {
    sid       = "Keys"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = local.stores[*].key_arn
  }
}

data "aws_iam_policy_document" "service_trust" {
  statement {
    actions = [var.eks == null ? "sts:AssumeRole" : "sts:AssumeRoleWithWebIdentity"]

    principals {
      type        = var.eks == null ? "Service" : "Federated"
      identifiers = [var.eks == null ? "ec2.amazonaws.com" : var.eks.oidc_provider_arn]
    }

    # Of this one service account, and with a token that was made for AWS.
    dynamic "condition" {
      for_each = var.eks == null ? {} : {
        sub = "system:serviceaccount:${var.eks.namespace}:${var.eks.service_account}"
        aud = "sts.amazonaws.com"
      }

      content {
        test     = "StringEquals"
        variable = "${trimprefix(var.eks.oidc_issuer, "https://")}:${condition.key}"
        values   = [condition.value]
      }
    }
  }
}

resource "aws_iam_role" "service" {
  name               = "${var.name}-service"
  assume_role_policy = data.aws_iam_policy_document.service_trust.json
}

resource "aws_iam_role_policy" "service" {
  name   = "stores"
  role   = aws_iam_role.service.id
  policy = data.aws_iam_policy_document.service.json
}

resource "aws_iam_instance_profile" "service" {
  count = var.eks == null ? 1 : 0
  name  = "${var.name}-service"
  role  = aws_iam_role.service.name
}
