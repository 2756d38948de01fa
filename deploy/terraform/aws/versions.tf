# Holdfast on AWS: buckets, the service's role, Postgres, and a fleet that trains. docs/operating/terraform.md explains it.
# The service itself runs where its role is: in EKS (deploy with its service account), or on an instance.
terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source                = "hashicorp/aws"
      version               = ">= 5.60, < 6"
      configuration_aliases = [aws.second]
    }
  }
}
