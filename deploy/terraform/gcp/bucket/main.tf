# One bucket for checkpoints: versioned, closed, encrypted with a key of its own. Nothing here ever deletes, moves or
# archives what a checkpoint needs: the service does that itself, and a rule of the bucket knows nothing of what is shared.
terraform {
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6, < 8"
    }
  }
}

variable "bucket" {
  description = "Its name."
  type        = string
}

variable "location" {
  description = "A region, or a dual-region."
  type        = string
}

variable "turbo_replication" {
  description = "With a dual-region alone."
  type        = bool
  default     = false
}

variable "prefix" {
  description = "The folder in it that is Holdfast's."
  type        = string
}

data "google_storage_project_service_account" "storage" {}

resource "google_kms_key_ring" "bucket" {
  name     = var.bucket
  location = lower(var.location)
}

resource "google_kms_crypto_key" "bucket" {
  name            = "checkpoints"
  key_ring        = google_kms_key_ring.bucket.id
  rotation_period = "7776000s"

  lifecycle {
    prevent_destroy = true
  }
}

# Google's own account of Cloud Storage uses the key; the service needs no right on it.
resource "google_kms_crypto_key_iam_member" "storage" {
  crypto_key_id = google_kms_crypto_key.bucket.id
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${data.google_storage_project_service_account.storage.email_address}"
}

# No retention policy and no default event-based hold: the service refuses such a bucket, because nothing could be deleted.
# What is held is held by the catalog alone; Holdfast uses no object lock at Google.
resource "google_storage_bucket" "checkpoints" {
  name                        = var.bucket
  location                    = var.location
  storage_class               = "STANDARD"
  rpo                         = var.turbo_replication ? "ASYNC_TURBO" : null
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = false
  depends_on                  = [google_kms_crypto_key_iam_member.storage]

  encryption {
    default_kms_key_name = google_kms_crypto_key.bucket.id
  }

  # The service deletes each generation that nothing needs, by its number. What anyone else deletes is only hidden.
  versioning {
    enabled = true
  }

  # It would keep, and bill, what the service has deleted for good.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  # Two rules, and none of them touches what is current. Holdfast makes no multipart uploads: the parts are others'. Below
  # history/ each process writes one small file again and again; only older versions of these go.
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }

    condition {
      age = 7
    }
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }

    condition {
      with_state                 = "ARCHIVED" # noncurrent, as Google calls it here
      days_since_noncurrent_time = 7
      matches_prefix             = ["${var.prefix}/history/"]
    }
  }

  lifecycle {
    prevent_destroy = true
  }
}

output "name" {
  description = "The bucket's."
  value       = google_storage_bucket.checkpoints.name
}
