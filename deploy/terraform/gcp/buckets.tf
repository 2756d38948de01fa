module "first" {
  source            = "./bucket"
  bucket            = var.bucket
  location          = coalesce(var.bucket_location, var.region)
  turbo_replication = var.turbo_replication
  prefix            = var.prefix
}

module "second" {
  count    = var.second == null ? 0 : 1
  source   = "./bucket"
  bucket   = var.second.bucket
  location = var.second.location
  prefix   = var.prefix
}

locals {
  stores = concat([module.first.name], module.second[*].name)
}
