output "store" {
  description = "For HOLDFAST_STORE."
  value       = "s3://${module.first.name}/${var.prefix}?region=${data.aws_region.first.name}"
}

output "second_store" {
  description = "For HOLDFAST_SECOND_STORE; null without one, and for a replica."
  value       = length(local.stores) < 2 ? null : "s3://${local.stores[1].name}/${var.prefix}?region=${data.aws_region.second.name}"
}

output "service_role_arn" {
  description = "For the annotation eks.amazonaws.com/role-arn of the service's service account."
  value       = aws_iam_role.service.arn
}

output "postgres_address" {
  description = "Host and port; null without one."
  value       = try(aws_db_instance.catalog[0].endpoint, null)
}

output "postgres_owner_secret_arn" {
  description = "The secret with the owner's password, which RDS changes by itself: make a role of its own for the service with it."
  value       = try(aws_db_instance.catalog[0].master_user_secret[0].secret_arn, null)
}

data "aws_region" "first" {}

data "aws_region" "second" {
  provider = aws.second
}
