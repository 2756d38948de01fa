# REGIONAL: a standby in another zone has each commit before it is acknowledged, and a failover goes there. Point-in-time
# recovery goes back to any moment of seven days. There is no password: the service's account signs in through the Cloud SQL Auth
# Proxy with --auto-iam-authn, and HOLDFAST_DATABASE_URL names the proxy.
locals {
  postgres = var.postgres == null ? [] : [var.postgres]
}

resource "google_sql_database_instance" "catalog" {
  count               = length(local.postgres)
  name                = "${var.name}-catalog"
  region              = var.region
  database_version    = "POSTGRES_17"
  deletion_protection = true

  settings {
    edition                     = "ENTERPRISE"
    tier                        = local.postgres[0].tier
    availability_type           = "REGIONAL"
    disk_type                   = "PD_SSD"
    disk_size                   = local.postgres[0].storage_gb
    disk_autoresize             = true
    deletion_protection_enabled = true

    backup_configuration {
      enabled                        = true
      point_in_time_recovery_enabled = true
      transaction_log_retention_days = 7

      backup_retention_settings {
        retained_backups = local.postgres[0].backup_days
      }
    }

    ip_configuration {
      ipv4_enabled    = false
      private_network = local.postgres[0].network
      ssl_mode        = "ENCRYPTED_ONLY"
    }

    database_flags {
      name  = "synchronous_commit"
      value = "on"
    }

    database_flags {
      name  = "cloudsql.iam_authentication"
      value = "on"
    }
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "google_sql_database" "holdfast" {
  count    = length(local.postgres)
  name     = "holdfast"
  instance = google_sql_database_instance.catalog[0].name
}

resource "google_sql_user" "service" {
  count    = length(local.postgres)
  name     = trimsuffix(google_service_account.service.email, ".gserviceaccount.com")
  instance = google_sql_database_instance.catalog[0].name
  type     = "CLOUD_IAM_SERVICE_ACCOUNT"
}

resource "google_project_iam_member" "database" {
  for_each = toset(var.postgres == null ? [] : ["roles/cloudsql.client", "roles/cloudsql.instanceUser"])
  project  = var.project
  role     = each.value
  member   = google_service_account.service.member

  condition {
    title      = "This instance alone"
    expression = "resource.name == 'projects/${var.project}/instances/${var.name}-catalog' && resource.service == 'sqladmin.googleapis.com'"
  }
}
