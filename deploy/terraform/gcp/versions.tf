# Holdfast on Google Cloud: buckets, the service's account, Postgres, and a fleet that trains. docs/operating/terraform.md
# explains it. The service itself runs in GKE as a Kubernetes service account, or on an instance with its account.
terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6, < 8"
    }
  }
}
