variable "name" {
  description = "Begins the name of everything that is made here."
  type        = string
  default     = "holdfast"
}

variable "bucket" {
  description = "The first store's bucket. Holdfast has it to itself: the service may list all of it."
  type        = string
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

variable "object_lock" {
  description = "Whether holds can be mirrored as legal holds. Only at the bucket's making. No default retention is set, ever: the service refuses such a bucket."
  type        = bool
  default     = false
}

variable "second" {
  description = "A second bucket, with the provider aws.second (another region). use = \"store\": for HOLDFAST_SECOND_STORE, the service copies and verifies. use = \"replica\": S3 copies everything and deletes nothing; never name it as a store while the first one lives. null: none."
  type = object({
    bucket = string
    use    = optional(string, "store")
  })
  default = null

  validation {
    condition     = var.second == null || contains(["store", "replica"], try(var.second.use, ""))
    error_message = "second.use is store or replica."
  }
}

variable "eks" {
  description = "The service's pod, if it runs in EKS: its cluster's OIDC provider, and the service account that takes the role. null: the role is an EC2 instance's."
  type = object({
    oidc_provider_arn = string
    oidc_issuer       = string
    namespace         = optional(string, "holdfast")
    service_account   = optional(string, "holdfast")
  })
  default = null
}

variable "postgres" {
  description = "RDS for Postgres with a synchronous standby. clients: the security groups of the service and its workers. null: there is another Postgres."
  type = object({
    vpc_id         = string
    subnets        = list(string)
    clients        = list(string)
    instance_class = optional(string, "db.m7g.large")
    storage_gb     = optional(number, 100)
    most_gb        = optional(number, 1000)
    backup_days    = optional(number, 14)
  })
  default = null
}

variable "fleet" {
  description = "Instances that train: on_demand of them always, the others spot. image: an AMI with the training code, `holdfast`, Docker or torch as the command needs, and the AWS CLI. command: what `holdfast launch` starts. token_secret_arn: the secret of Secrets Manager that is a Holdfast token. root_device: /dev/xvda for Amazon Linux. null: none."
  type = object({
    image            = string
    instance_types   = list(string)
    subnets          = list(string)
    security_groups  = list(string)
    command          = string
    run              = string
    service_url      = string
    token_secret_arn = string
    user             = optional(string, "train")
    machines         = optional(number, 1)
    on_demand        = optional(number, 0)
    disk_gb          = optional(number, 200)
    root_device      = optional(string, "/dev/sda1")
  })
  default = null
}
