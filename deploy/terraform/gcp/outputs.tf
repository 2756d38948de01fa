output "store" {
  description = "For HOLDFAST_STORE."
  value       = "gs://${module.first.name}/${var.prefix}"
}

output "second_store" {
  description = "For HOLDFAST_SECOND_STORE; null without one."
  value       = length(local.stores) < 2 ? null : "gs://${local.stores[1]}/${var.prefix}"
}

output "service_account" {
  description = "For the annotation iam.gke.io/gcp-service-account of the service's Kubernetes service account."
  value       = google_service_account.service.email
}

output "postgres_connection" {
  description = "What the Cloud SQL Auth Proxy is started with; null without one."
  value       = try(google_sql_database_instance.catalog[0].connection_name, null)
}
