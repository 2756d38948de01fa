"""No acknowledged commit is lost by a failover; a machine that trains acts on its notice and on the job's exit code."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest

from holdfast_client.cli.output import ExitCode
from tests.terraform.modules import TERRAFORM, blocks, one

TEMPLATE = (TERRAFORM / "train.sh.tftpl").read_text(encoding="utf-8")


def test_a_failover_goes_to_a_standby_that_has_every_commit() -> None:
    amazon = one("aws", "aws_db_instance")
    assert amazon["multi_az"] is True
    assert {"name": "synchronous_commit", "value": "on"} in one("aws", "aws_db_parameter_group")["parameter"]
    (google,) = one("gcp", "google_sql_database_instance")["settings"]
    assert google["availability_type"] == "REGIONAL"
    assert {"name": "synchronous_commit", "value": "on"} in google["database_flags"]


def test_the_database_can_be_put_back_to_a_moment_and_is_not_deleted_by_mistake() -> None:
    amazon = one("aws", "aws_db_instance")
    assert amazon["backup_retention_period"] == "${local.postgres[0].backup_days}"
    assert (amazon["deletion_protection"], amazon["skip_final_snapshot"]) == (True, False)
    google = one("gcp", "google_sql_database_instance")
    (backup,) = google["settings"][0]["backup_configuration"]
    assert (backup["enabled"], backup["point_in_time_recovery_enabled"]) == (True, True)
    assert (google["deletion_protection"], google["settings"][0]["deletion_protection_enabled"]) == (True, True)


def test_the_database_is_reached_from_inside_by_tls_alone_and_no_password_is_in_the_state() -> None:
    amazon = one("aws", "aws_db_instance")
    assert (amazon["publicly_accessible"], amazon["storage_encrypted"]) == (False, True)
    assert amazon["manage_master_user_password"] is True
    assert "password" not in amazon
    assert {"name": "rds.force_ssl", "value": "1"} in one("aws", "aws_db_parameter_group")["parameter"]
    assert not list(blocks("aws", "aws_vpc_security_group_egress_rule"))
    (google,) = one("gcp", "google_sql_database_instance")["settings"]
    (network,) = google["ip_configuration"]
    assert (network["ipv4_enabled"], network["ssl_mode"]) == (False, "ENCRYPTED_ONLY")
    assert one("gcp", "google_sql_user")["type"] == "CLOUD_IAM_SERVICE_ACCOUNT"


def test_a_fleet_is_of_spot_and_on_demand_machines() -> None:
    (policy,) = one("aws", "aws_autoscaling_group")["mixed_instances_policy"]
    (shares,) = policy["instances_distribution"]
    assert shares["on_demand_base_capacity"] == "${local.fleet[0].on_demand}"
    assert shares["on_demand_percentage_above_base_capacity"] == 0
    (scheduling,) = one("gcp", "google_compute_instance_template")["scheduling"]
    assert scheduling["provisioning_model"] == '${each.key == "spot" ? "SPOT" : "STANDARD"}'


def test_a_machines_metadata_are_asked_with_a_token_and_its_disk_is_encrypted() -> None:
    template = one("aws", "aws_launch_template")
    (metadata,) = template["metadata_options"]
    assert (metadata["http_tokens"], metadata["http_put_response_hop_limit"]) == ("required", 1)
    assert template["block_device_mappings"][0]["ebs"][0]["encrypted"] is True


def rendered(**values: str | int) -> str:
    """As templatefile() does it, for the two forms that stand in the template."""
    text = re.sub(r"\$\{(\w+) \+ (\d+)\}", lambda found: str(int(values[found[1]]) + int(found[2])), TEMPLATE)
    return re.sub(r"\$\{(\w+)\}", lambda found: str(values[found[1]]), text)


def script(token_command: str) -> str:
    return rendered(
        command="torchrun --standalone train.py",
        run="demo/gpt",
        service_url="https://holdfast.example.org",
        user="train",
        grace_seconds=100,
        token_command=token_command,
    )


@pytest.mark.parametrize(
    ("cloud", "kind"), [("aws", "aws_launch_template"), ("gcp", "google_compute_instance_template")]
)
def test_both_clouds_give_the_template_what_it_asks_for(cloud: str, kind: str) -> None:
    asked = set(re.findall(r"\$\{(\w+)[^}]*\}", TEMPLATE))
    given = re.search(r"train\.sh\.tftpl\"?, \{?(.*)", repr(one(cloud, kind)), re.DOTALL)
    assert given
    assert all(f"{name}" in given[1] for name in asked)
    assert asked == {"command", "run", "service_url", "user", "grace_seconds", "token_command"}


def test_the_first_boot_is_a_script_that_bash_can_read() -> None:
    done = subprocess.run(["bash", "-n"], input=script("true"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_launches_again_what_was_preempted_and_nothing_else() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string(re.search(r"<<'UNIT'\n(.*?)\nUNIT\n", script("true"), re.DOTALL)[1])  # type: ignore[index]
    service = unit["Service"]
    assert service["Restart"] == "no"
    assert set(map(int, service["RestartForceExitStatus"].split())) == {ExitCode.PREEMPTED, ExitCode.UNKNOWN}
    assert service["KillMode"] == "mixed"
    # The job has ended, or `holdfast launch` has killed it, before systemd kills both.
    assert int(service["TimeoutStopSec"]) >= 100 + 5


def trained(tmp_path: Path, token_command: str) -> subprocess.CompletedProcess[str]:
    """The script that systemd starts, with a `holdfast` that says what it was started with."""
    path = tmp_path / "train.sh"
    path.write_text(re.search(r"<<'TRAIN'\n(.*?)\nTRAIN\n", script(token_command), re.DOTALL)[1])  # type: ignore[index]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "holdfast").write_text(
        '#!/bin/sh\necho "$HOLDFAST_RUN $HOLDFAST_URL $HOLDFAST_TOKEN"\necho "$@"\nexit 75\n'
    )
    (programs / "holdfast").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    return subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True)


def test_the_job_is_launched_with_its_token_and_its_exit_code_is_handed_on(tmp_path: Path) -> None:
    done = trained(tmp_path, "echo a-token")
    assert done.stdout.splitlines() == [
        "demo/gpt https://holdfast.example.org a-token",
        "launch --grace 100 -- torchrun --standalone train.py",
    ]
    assert done.returncode == ExitCode.PREEMPTED


def test_a_token_that_cannot_be_had_now_is_asked_for_again_later(tmp_path: Path) -> None:
    done = trained(tmp_path, "false")
    assert (done.returncode, done.stdout) == (ExitCode.PREEMPTED, "")
