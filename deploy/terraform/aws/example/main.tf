# Everything at once. `terraform validate` runs here: the module itself needs a second provider from its caller.
terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.60, < 6"
    }
  }
}

provider "aws" {
  region = "eu-central-1"
}

provider "aws" {
  alias  = "second"
  region = "eu-west-1"
}

module "holdfast" {
  source      = "../"
  bucket      = "example-checkpoints"
  object_lock = true

  second = {
    bucket = "example-checkpoints-second"
  }

  eks = {
    oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-central-1.amazonaws.com/id/EXAMPLE"
    oidc_issuer       = "https://oidc.eks.eu-central-1.amazonaws.com/id/EXAMPLE"
  }

  postgres = {
    vpc_id  = "vpc-0123456789abcdef0"
    subnets = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
    clients = ["sg-0123456789abcdef0"]
  }

  fleet = {
    image            = "ami-0123456789abcdef0"
    instance_types   = ["p5.48xlarge", "p5e.48xlarge"]
    subnets          = ["subnet-0123456789abcdef0"]
    security_groups  = ["sg-0123456789abcdef1"]
    command          = "torchrun --standalone --nproc-per-node=8 --max-restarts=3 /opt/train/train.py"
    run              = "demo/gpt"
    service_url      = "https://holdfast.example.org"
    token_secret_arn = "arn:aws:secretsmanager:eu-central-1:111122223333:secret:holdfast-trainer-AbCdEf"
  }

  providers = {
    aws        = aws
    aws.second = aws.second
  }
}
