variable "name" {
  description = "Begins the name of everything that is made here."
  type        = string
  default     = "holdfast"
}

variable "project" {
  description = "The id of the project."
  type        = string
}

variable "region" {
  description = "Of the service, Postgres and the fleet. The service reads each new byte once, so the first bucket belongs here too."
  type        = string
}

variable "bucket" {
  description = "The first store's bucket, which Holdfast has to itself."
  type        = string
}

variable "bucket_location" {
  description = "The first bucket's place. null: the region above. A dual-region such as EUR4 keeps each object in two regions by itself."
  type        = string
  default     = null
}

variable "turbo_replication" {
  description = "With a dual-region alone: Google aims at 15 minutes from one region to the other."
  type        = bool
  default     = false
}

variable "prefix" {
  description = "The folder in the buckets, as it stands in HOLDFAST_STORE, without slashes at its ends."
  type        = string
  default     = "checkpoints"

  validation {
    condition     = can(regex("^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", var.prefix))
    error_message = "Letters, digits, hyphens and underscores, with single slashes in between."
  }
}

variable "second" {
  description = "A second bucket in another place, for HOLDFAST_SECOND_STORE: the service copies and verifies. null: none."
  type = object({
    bucket   = string
    location = string
  })
  default = null
}

variable "workload_identity" {
  description = "The service's pod, if it runs in GKE: the Kubernetes service account that acts as the service's account. null: an instance does."
  type = object({
    namespace       = optional(string, "holdfast")
    service_account = optional(string, "holdfast")
  })
  default = null
}

variable "postgres" {
  description = "Cloud SQL for Postgres with a synchronous standby in another zone. network: the VPC's self link, with private services access. null: there is another Postgres."
  type = object({
    network     = string
    tier        = optional(string, "db-custom-4-16384")
    storage_gb  = optional(number, 100)
    backup_days = optional(number, 14)
  })
  default = null
}

variable "fleet" {
  description = "Instances that train: two groups, spot and on demand. image: with the training code, `holdfast`, what the command needs, and gcloud. command: what `holdfast launch` starts. token_secret: the id of the secret of Secret Manager that is a Holdfast token. null: none."
  type = object({
    image         = string
    machine_type  = string
    network       = string
    subnetwork    = string
    command       = string
    run           = string
    on_demand_run = optional(string)
    service_url   = string
    token_secret  = string
    user          = optional(string, "train")
    spot_machines = optional(number, 1)
    on_demand     = optional(number, 0)
    disk_gb       = optional(number, 200)
    gpu           = optional(string)
    gpus          = optional(number, 0)
    zones         = optional(list(string))
  })
  default = null
}
