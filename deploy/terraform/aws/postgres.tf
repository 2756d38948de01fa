# Multi-AZ: a standby in another zone has each commit before it is acknowledged, and a failover goes there. fsync and
# full_page_writes are RDS's, and on. Point-in-time recovery goes back to any second of `backup_days`.
locals {
  postgres = var.postgres == null ? [] : [var.postgres]
}

resource "aws_kms_key" "postgres" {
  count                   = length(local.postgres)
  description             = "The catalog of ${var.name}, and its backups."
  enable_key_rotation     = true
  deletion_window_in_days = 30

  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_db_subnet_group" "catalog" {
  count      = length(local.postgres)
  name       = "${var.name}-catalog"
  subnet_ids = local.postgres[0].subnets
}

resource "aws_security_group" "postgres" {
  count       = length(local.postgres)
  name        = "${var.name}-postgres"
  description = "Postgres of ${var.name}: from the service and its workers alone"
  vpc_id      = local.postgres[0].vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "postgres" {
  for_each                     = toset(var.postgres == null ? [] : var.postgres.clients)
  security_group_id            = aws_security_group.postgres[0].id
  description                  = "Service and workers"
  referenced_security_group_id = each.value
  from_port                    = 5432
  to_port                      = 5432
  ip_protocol                  = "tcp"
}

resource "aws_db_parameter_group" "catalog" {
  count  = length(local.postgres)
  name   = "${var.name}-catalog"
  family = "postgres17"

  parameter {
    name  = "synchronous_commit"
    value = "on"
  }

  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }
}

resource "aws_db_instance" "catalog" {
  count                           = length(local.postgres)
  identifier                      = "${var.name}-catalog"
  engine                          = "postgres"
  engine_version                  = "17"
  instance_class                  = local.postgres[0].instance_class
  db_name                         = "holdfast"
  username                        = "holdfast_owner"
  manage_master_user_password     = true # in Secrets Manager, and never in Terraform's state
  allocated_storage               = local.postgres[0].storage_gb
  max_allocated_storage           = local.postgres[0].most_gb
  storage_type                    = "gp3"
  storage_encrypted               = true
  kms_key_id                      = aws_kms_key.postgres[0].arn
  multi_az                        = true
  backup_retention_period         = local.postgres[0].backup_days
  copy_tags_to_snapshot           = true
  deletion_protection             = true
  skip_final_snapshot             = false
  final_snapshot_identifier       = "${var.name}-catalog-last"
  publicly_accessible             = false
  db_subnet_group_name            = aws_db_subnet_group.catalog[0].name
  vpc_security_group_ids          = [aws_security_group.postgres[0].id]
  parameter_group_name            = aws_db_parameter_group.catalog[0].name
  auto_minor_version_upgrade      = true
  enabled_cloudwatch_logs_exports = ["postgresql"]

  lifecycle {
    prevent_destroy = true
  }
}
