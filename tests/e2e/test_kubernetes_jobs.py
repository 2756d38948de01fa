"""The examples of jobs, the agent of a node and the experiments of Chaos Mesh, without a cluster."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripts import write_manifests

from holdfast_client.cli.launch import is_torchrun
from holdfast_client.cli.output import ExitCode
from tests.chaos_run.faults import ALL, OF_AGENTS
from tests.support.kubernetes import EXAMPLES, ROOT, check_strictly, documents, env_of, jobs, plain, pod_of, pods
from tests.support.ports import free_ports
from tests.support.processes import ServerProcess
from tests.support.serve import without_holdfast_settings

CHAOS = sorted((ROOT / "deploy" / "chaos-mesh").glob("*.yaml"))


def test_the_agent_of_a_node_serves_is_asked_and_ends_in_its_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its command and its probe as processes, with the host's folder in its place."""
    (daemons,) = documents((ROOT / "deploy/kubernetes/agent.yaml").read_text())
    check_strictly([daemons])
    pod = pod_of(daemons)
    (container,) = pod["containers"]
    (folder,) = [each for each in pod["volumes"] if "hostPath" in each]
    place, metrics = tmp_path_factory.mktemp("a"), free_ports()
    here = {folder["hostPath"]["path"]: str(place), "0.0.0.0:9464": f"127.0.0.1:{metrics}"}

    def process(words: list[str]) -> list[str]:
        program, *rest = words
        for there, ours in here.items():
            rest = [word.replace(there, ours) for word in rest]
        return [str(Path(sysconfig.get_path("scripts")) / program), *rest]

    def is_alive() -> bool:
        probe = process(container["livenessProbe"]["exec"]["command"])
        return subprocess.run(probe, env=without_holdfast_settings(), capture_output=True).returncode == 0

    agent = ServerProcess(
        process([*container["command"], *container["args"]]),
        log=tmp_path_factory.mktemp("log") / "agent.log",
        ready=is_alive,
        env=without_holdfast_settings(),
    )
    assert httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=60).text.count("holdfast_agent_ranks 0.0") == 1
    agent.stop(grace_seconds=pod["terminationGracePeriodSeconds"])
    assert not is_alive()
    words = container["args"]
    assert int(words[words.index("--grace") + 1]) < pod["terminationGracePeriodSeconds"]
    (made,) = pod["initContainers"]
    assert made["command"][-1] == folder["hostPath"]["path"]
    assert made["command"][made["command"].index("-o") + 1] == str(container["securityContext"]["runAsUser"])


def test_the_jobs_of_the_examples_are_what_kubernetes_takes() -> None:
    for file in EXAMPLES:
        check_strictly(documents(file.read_text()) + jobs(file))


@pytest.mark.rule("told-outcome")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_a_job_is_started_again_by_its_exit_code_with_the_same_command(file: Path) -> None:
    (job,) = jobs(file)
    pod = pod_of(job)
    (container,) = pod["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = {
        code: rule["action"]
        for rule in reversed(rules)
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert codes == {ExitCode.FENCED: "FailJob", ExitCode.PREEMPTED: "Ignore"}
    by_code = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
    assert {(each["containerName"], each["operator"]) for each in by_code} == {(container["name"], "In")}
    assert {"type": "DisruptionTarget", "status": "True"} in [
        each for rule in rules for each in rule.get("onPodConditions", [])
    ]
    words = " ".join([*container["command"], *container["args"]]).removeprefix("/bin/sh -c exec ").split()
    assert words[:2] == ["holdfast", "launch"]
    assert int(words[words.index("--grace") + 1]) < pod["terminationGracePeriodSeconds"]
    assert is_torchrun(words[words.index("--") + 1 :])
    assert pod["restartPolicy"] == "Never"
    run = next(each["value"] for each in container["env"] if each["name"] == "HOLDFAST_RUN")
    assert "$" not in run, "the next launch must find the same run"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_a_job_mounts_nothing_but_a_token_and_an_authority(file: Path) -> None:
    (job,) = jobs(file)
    pod = pod_of(job)
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    for volume in pod["volumes"]:
        if "projected" in volume:
            (source,) = volume["projected"]["sources"]
            assert source["serviceAccountToken"]["audience"] == "holdfast"
        elif "configMap" in volume:
            assert volume["name"] == "ca"
        else:
            assert volume["emptyDir"] == {"medium": "Memory"}, volume
    (container,) = pod["containers"]
    mounted = {each["mountPath"]: each for each in container["volumeMounts"]}
    variables = {each["name"]: each for each in container["env"]}
    if "HOLDFAST_TOKEN" in variables:
        assert mounted.keys() == {"/dev/shm", "/etc/holdfast-ca"}
        assert "secretKeyRef" in variables["HOLDFAST_TOKEN"]["valueFrom"]
    else:
        token = Path(variables["HOLDFAST_IDENTITY_TOKEN_FILE"]["value"])
        assert mounted.keys() == {"/dev/shm", "/etc/holdfast-ca", str(token.parent)}
        assert mounted[str(token.parent)]["readOnly"]


def test_jobs_call_the_service_that_the_manifests_make_and_the_agent_has_their_files() -> None:
    found = plain()
    (service,) = [each for each in found if each["kind"] == "Service"]
    scheme = pods(found)["holdfast"]["containers"][0]["readinessProbe"]["httpGet"]["scheme"].lower()
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    url = f"{scheme}://{name}.{write_manifests.NAMESPACE}.svc:{port['port']}"
    (agent,) = documents((ROOT / "deploy/kubernetes/agent.yaml").read_text())

    def authority(pod: dict[str, Any]) -> list[Any]:
        mounts = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "ca"]
        return mounts + [each for each in pod["volumes"] if each["name"] == "ca"]

    for file in EXAMPLES:
        (job,) = jobs(file)
        assert env_of(pod_of(job))["HOLDFAST_URL"] == url, file.name
        assert authority(pod_of(job)) == authority(pod_of(agent)), file.name


@pytest.mark.parametrize(
    ("name", "variables", "is_host"),
    [
        ("indexed-job.yaml", {"JOB_COMPLETION_INDEX": "0"}, "1"),
        ("indexed-job.yaml", {"JOB_COMPLETION_INDEX": "1"}, "0"),
        ("jobset.yaml", {"RACK": "0", "JOB_COMPLETION_INDEX": "0"}, "1"),
        ("jobset.yaml", {"RACK": "1", "JOB_COMPLETION_INDEX": "0"}, "0"),
        ("jobset.yaml", {"RACK": "0", "JOB_COMPLETION_INDEX": "1"}, "0"),
    ],
)
def test_one_pod_holds_the_rendezvous_and_the_launcher_is_the_first_process(
    tmp_path: Path, name: str, variables: dict[str, str], is_host: str
) -> None:
    file = ROOT / "examples" / "kubernetes" / name
    (job,) = jobs(file)
    (container,) = pod_of(job)["containers"]
    stub = tmp_path / "holdfast"
    stub.write_text('#!/bin/sh\necho $$ "$@"\n')
    stub.chmod(0o755)
    started = subprocess.Popen(
        [*container["command"], *container["args"]],
        env={"PATH": str(tmp_path)} | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = started.communicate(timeout=60)
    words = output.split()
    assert words[0] == str(started.pid)
    assert f"--rdzv-conf=is_host={is_host}" in words
    racks = [
        each["replicas"]
        for one in documents(file.read_text())
        for each in one.get("spec", {}).get("replicatedJobs", [])
    ]
    assert f"--nnodes={job['spec']['completions'] * sum(racks or [1])}" in words


def test_the_experiments_are_the_faults_of_make_chaos() -> None:
    """Each of them has one, and none is made up."""
    named = [
        line.removeprefix("# make chaos: ").partition(".")[0]
        for file in CHAOS
        for line in file.read_text().splitlines()
        if line.startswith("# make chaos: ")
    ]
    assert sorted(named) == sorted(ALL | OF_AGENTS)
    service = next(each for each in plain() if each["metadata"]["name"] == "holdfast" and each["kind"] == "Deployment")
    for file in CHAOS:
        for experiment in documents(file.read_text()):
            spec = experiment["spec"]
            assert experiment["apiVersion"] == "chaos-mesh.org/v1alpha1"
            assert spec["selector"]["namespaces"], "an experiment without a namespace strikes the whole cluster"
            at_service = [
                each
                for each in (spec["selector"], spec.get("target", {}).get("selector", {}))
                if each.get("namespaces") == ["holdfast"]
            ]
            for each in at_service:
                assert each["labelSelectors"].items() <= service["spec"]["template"]["metadata"]["labels"].items()
            # What has no end of its own is a kill, or says that it stays.
            assert (
                spec.get("duration")
                or experiment["kind"] == "PodChaos"
                or "until the experiment is deleted" in file.read_text()
            )
