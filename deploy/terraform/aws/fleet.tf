# Machines that train. EC2 announces the end of a spot instance two minutes ahead, in its metadata, and `holdfast launch`
# and the SDK look there by themselves. A machine that the group takes away is shut down: systemd then stops the job by
# SIGTERM, which is a notice too.
locals {
  fleet = var.fleet == null ? [] : [var.fleet]
}

data "aws_iam_policy_document" "trainer_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "trainer" {
  count = length(local.fleet)

  # Its token, and nothing else: neither a bucket nor a key.
  statement {
    sid       = "Token"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [local.fleet[0].token_secret_arn]
  }
}

resource "aws_iam_role" "trainer" {
  count              = length(local.fleet)
  name               = "${var.name}-trainer"
  assume_role_policy = data.aws_iam_policy_document.trainer_trust.json
}

resource "aws_iam_role_policy" "trainer" {
  count  = length(local.fleet)
  name   = "token"
  role   = aws_iam_role.trainer[0].id
  policy = data.aws_iam_policy_document.trainer[0].json
}

resource "aws_iam_instance_profile" "trainer" {
  count = length(local.fleet)
  name  = "${var.name}-trainer"
  role  = aws_iam_role.trainer[0].name
}

resource "aws_launch_template" "trainer" {
  count                  = length(local.fleet)
  name                   = "${var.name}-trainer"
  image_id               = local.fleet[0].image
  vpc_security_group_ids = local.fleet[0].security_groups
  update_default_version = true

  # A shutdown from inside ends the machine, and the group makes another one.
  instance_initiated_shutdown_behavior = "terminate"

  user_data = base64encode(templatefile("${path.module}/../train.sh.tftpl", {
    command       = local.fleet[0].command
    run           = local.fleet[0].run
    service_url   = local.fleet[0].service_url
    user          = local.fleet[0].user
    grace_seconds = 100 # of EC2's 120
    token_command = "aws secretsmanager get-secret-value --secret-id ${local.fleet[0].token_secret_arn} --query SecretString --output text"
  }))

  iam_instance_profile {
    arn = aws_iam_instance_profile.trainer[0].arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = local.fleet[0].root_device

    ebs {
      volume_size           = local.fleet[0].disk_gb
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
}

resource "aws_autoscaling_group" "trainer" {
  count               = length(local.fleet)
  name                = "${var.name}-trainer"
  min_size            = 0
  max_size            = local.fleet[0].machines
  desired_capacity    = local.fleet[0].machines
  vpc_zone_identifier = local.fleet[0].subnets
  # EC2 only recommends it, and most of those machines live on. The SDK saves at such a hint, and goes on.
  capacity_rebalance = false

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = local.fleet[0].on_demand
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.trainer[0].id
        version            = aws_launch_template.trainer[0].latest_version
      }

      dynamic "override" {
        for_each = local.fleet[0].instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  tag {
    key                 = "Name"
    value               = "${var.name}-trainer"
    propagate_at_launch = true
  }
}
