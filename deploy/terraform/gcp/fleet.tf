# Machines that train. A group of Compute Engine has one provisioning model, so there are two: spot, and on demand. Google
# announces the end of a spot machine some 30 seconds ahead, in its metadata, and `holdfast launch` and the SDK wait for that
# by themselves. A machine that a group takes away is shut down: systemd then stops the job by SIGTERM, which is a notice too.
locals {
  fleet = var.fleet == null ? {} : {
    spot      = { machines = var.fleet.spot_machines, run = var.fleet.run }
    on-demand = { machines = var.fleet.on_demand, run = coalesce(var.fleet.on_demand_run, "${var.fleet.run}-on-demand") }
  }
}

resource "google_service_account" "trainer" {
  count        = var.fleet == null ? 0 : 1
  account_id   = "${var.name}-trainer"
  display_name = "Machines that train"
}

# Its token, and nothing else: neither a bucket nor a key.
resource "google_secret_manager_secret_iam_member" "token" {
  count     = var.fleet == null ? 0 : 1
  secret_id = var.fleet.token_secret
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.trainer[0].member
}

resource "google_compute_instance_template" "trainer" {
  for_each     = local.fleet
  name_prefix  = "${var.name}-${each.key}-"
  machine_type = var.fleet.machine_type

  metadata = {
    block-project-ssh-keys = "true"
    startup-script = templatefile("${path.module}/../train.sh.tftpl", {
      command       = var.fleet.command
      run           = each.value.run
      service_url   = var.fleet.service_url
      user          = var.fleet.user
      grace_seconds = each.key == "spot" ? 20 : 60 # of Google's 30, and of what a shutdown on demand waits
      token_command = "gcloud secrets versions access latest --secret=${var.fleet.token_secret} --project=${var.project}"
    })
  }

  disk {
    source_image = var.fleet.image
    disk_size_gb = var.fleet.disk_gb
    disk_type    = "pd-balanced"
    boot         = true
    auto_delete  = true
  }

  dynamic "guest_accelerator" {
    for_each = var.fleet.gpu == null ? [] : [var.fleet.gpu]

    content {
      type  = guest_accelerator.value
      count = var.fleet.gpus
    }
  }

  network_interface {
    network    = var.fleet.network
    subnetwork = var.fleet.subnetwork
  }

  scheduling {
    provisioning_model          = each.key == "spot" ? "SPOT" : "STANDARD"
    preemptible                 = each.key == "spot"
    automatic_restart           = each.key != "spot"
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = each.key == "spot" ? "STOP" : null
  }

  service_account {
    email  = google_service_account.trainer[0].email
    scopes = ["cloud-platform"]
  }

  shielded_instance_config {
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_region_instance_group_manager" "trainer" {
  for_each                         = local.fleet
  name                             = "${var.name}-${each.key}"
  region                           = var.region
  base_instance_name               = "${var.name}-${each.key}"
  target_size                      = each.value.machines
  distribution_policy_zones        = var.fleet.zones
  distribution_policy_target_shape = "ANY"

  version {
    instance_template = google_compute_instance_template.trainer[each.key].self_link_unique
  }

  # A machine is changed when it is made anew, and never while it trains.
  update_policy {
    type                         = "OPPORTUNISTIC"
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = 3
  }
}
