"""docker-compose.yml without Docker: the same commands with the same settings, as plain processes.

What differs is only what a container would give: each service's name is 127.0.0.1 here, its ports are free ones, and
its files lie in a temporary folder.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml
from psycopg import sql
from sqlalchemy import make_url

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from tests.support.ports import free_ports
from tests.support.postgres import PostgresServer
from tests.support.processes import ServerProcess
from tests.support.rank import Job
from tests.support.serve import without_holdfast_settings
from tests.support.tls import Authority

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = {
    "POSTGRES_PASSWORD",
    "S3_ACCESS_KEY",
    "S3_SECRET_KEY",
    "S3_PUBLIC_ENDPOINT",
    "HOLDFAST_BOOTSTRAP_TOKEN",
    "HOLDFAST_SECRETS_KEY",
}
TLS = "docker-compose.tls.yml"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<rest>[^}]*))?\}")


class MissingSetting(Exception):
    """What `docker compose` says about a required variable that is not set."""


def interpolated(text: str, environment: Mapping[str, str]) -> str:
    """As Compose does it: `${X:?message}` must be set and not empty, `${X:-default}` may be left out."""

    def value(match: re.Match[str]) -> str:
        found = environment.get(match["name"], "")
        if found:
            return found
        if match["kind"] == ":?":
            raise MissingSetting(match["rest"])
        return match["rest"] or ""

    return _VARIABLE.sub(value, text)


def laid_over(below: Any, above: Any) -> Any:
    """As Compose merges files: what is named in both is the later one's, and lists are put together."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: laid_over(below[key], value) if key in below else value for key, value in above.items()}
    return below + above if isinstance(below, list) and isinstance(above, list) else above


def compose(environment: Mapping[str, str], *over: str) -> dict[str, Any]:
    raw: Any = {}
    for name in ("docker-compose.yml", *over):
        raw = laid_over(raw, yaml.safe_load((ROOT / name).read_text(encoding="utf-8")))

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(inner) for key, inner in node.items()}
        if isinstance(node, list):
            return [walk(inner) for inner in node]
        return interpolated(node, environment) if isinstance(node, str) else node

    document: dict[str, Any] = walk(raw)
    return document


@pytest.fixture
def environment() -> dict[str, str]:
    return {
        "POSTGRES_PASSWORD": secrets.token_hex(20),
        "S3_ACCESS_KEY": secrets.token_hex(20),
        "S3_SECRET_KEY": secrets.token_hex(20),
        "S3_PUBLIC_ENDPOINT": "http://192.0.2.10:8333",
        "HOLDFAST_BOOTSTRAP_TOKEN": f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}",
        "HOLDFAST_SECRETS_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }


@pytest.mark.parametrize("missing", sorted(REQUIRED))
def test_each_secret_must_be_set_and_what_is_missing_is_named(environment: dict[str, str], missing: str) -> None:
    for incomplete in ({k: v for k, v in environment.items() if k != missing}, environment | {missing: ""}):
        with pytest.raises(MissingSetting, match=missing):
            compose(incomplete)


@pytest.mark.parametrize("missing", ["TLS_CERTIFICATE", "TLS_KEY"])
def test_https_needs_a_certificate_and_its_key(environment: dict[str, str], missing: str) -> None:
    environment |= {"TLS_CERTIFICATE": "c.pem", "TLS_KEY": "k.pem"}
    del environment[missing]
    with pytest.raises(MissingSetting, match=missing):
        compose(environment, TLS)


def published(document: dict[str, Any]) -> dict[str, list[str]]:
    """The ports that a machine's network reaches, by service."""
    open_ports = {
        name: [port for port in service.get("ports", ()) if not port.startswith("127.0.0.1:")]
        for name, service in document["services"].items()
    }
    return {name: ports for name, ports in open_ports.items() if ports}


def test_other_machines_reach_nothing_but_https(environment: dict[str, str]) -> None:
    assert published(compose(environment)) == {}
    settings = re.findall(r"^#   (\w+)=(.*)$", (ROOT / TLS).read_text(), re.MULTILINE)
    document = compose(environment | dict(settings), TLS)
    assert published(document) == {"seaweedfs": ["8334:8334"], "holdfast": ["8400:8400"]}
    assert "HOLDFAST_TLS_CERTIFICATE" in document["services"]["holdfast"]["environment"]
    assert "s3.port.https=8334" in document["configs"]["s3_options"]["content"].splitlines()
    assert dict(settings)["S3_PUBLIC_ENDPOINT"].startswith("https://")
    assert dict(settings)["COMPOSE_FILE"] == f"docker-compose.yml:{TLS}"


def test_what_is_secret_is_a_file_and_no_variable(environment: dict[str, str]) -> None:
    document = compose(environment | {"TLS_CERTIFICATE": "c.pem", "TLS_KEY": "k.pem"}, TLS)
    services = document["services"]
    assert services["holdfast"]["secrets"] == ["secrets_key", "tls_certificate", "tls_key"]
    assert services["worker"]["secrets"] == ["secrets_key"]
    assert services["seaweedfs"]["secrets"] == ["tls_certificate", "tls_key"]
    assert document["secrets"].keys() == set(services["holdfast"]["secrets"])
    for service in services.values():
        assert environment["HOLDFAST_SECRETS_KEY"] not in service.get("environment", {}).values()


def test_the_example_has_every_setting_and_no_secret() -> None:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert settings == dict.fromkeys(REQUIRED, "")


def test_every_service_has_a_health_check_a_named_volume_and_a_fixed_version(environment: dict[str, str]) -> None:
    document = compose(environment)
    assert set(document["services"]) == {"postgres", "seaweedfs", "holdfast", "worker", "prometheus", "grafana"}
    for name, service in document["services"].items():
        # A worker has no port, and must not inherit the image's check of one.
        assert service["healthcheck"] == {"disable": True} or service["healthcheck"]["test"][0] == "CMD", name
        assert re.search(r":v?\d", service["image"]), f"{name}: an image without a version changes by itself"
        for volume in service.get("volumes", ()):
            source, *_, last = volume.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists(), f"{name}: {source} is not there"
                assert last == "ro"
            else:
                assert source in document["volumes"], f"{name}: data must outlive the container"
    waits = document["services"]["holdfast"]["depends_on"]
    assert {each["condition"] for each in waits.values()} == {"service_healthy"}


def mounted(document: dict[str, Any], service: str, path: str) -> Path:
    """What of the repository a container has there."""
    (found,) = [each for each in document["services"][service]["volumes"] if each.split(":")[1] == path]
    return ROOT / found.split(":")[0]


def test_prometheus_and_grafana_are_provisioned_and_started_only_when_asked_for(environment: dict[str, str]) -> None:
    document = compose(environment)
    services = document["services"]
    assert {name for name, each in services.items() if each.get("profiles") == ["observe"]} == {"prometheus", "grafana"}
    for name in ("prometheus.yml", "rules.yml"):
        assert mounted(document, "prometheus", f"/etc/prometheus/{name}") == ROOT / "deploy" / "prometheus" / name
    configuration = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    own = next(each for each in configuration["scrape_configs"] if each["job_name"] == "holdfast")
    (token,) = services["prometheus"]["configs"]
    assert token["target"] == f"/etc/prometheus/{own['authorization']['credentials_file']}"
    assert document["configs"][token["source"]]["content"] == "HOLDFAST_METRICS_TOKEN is not set in .env"
    given = compose(environment | {"HOLDFAST_METRICS_TOKEN": "hold_x"})
    assert given["configs"][token["source"]]["content"] == "hold_x"
    provisioning = mounted(document, "grafana", "/etc/grafana/provisioning")
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (catalog,) = yaml.safe_load((provisioning / "datasources" / "catalog.yml").read_text())["datasources"]
    assert catalog["url"].partition(":")[0] in services
    assert catalog["jsonData"]["database"] == services["postgres"]["environment"]["POSTGRES_DB"]
    secret = catalog["secureJsonData"]["password"].removeprefix("$")
    assert services["grafana"]["environment"][secret] == ""
    given = compose(environment | {"HOLDFAST_DASHBOARD_PASSWORD": "s3cret"})
    assert given["services"]["grafana"]["environment"][secret] == "s3cret"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "holdfast.yml").read_text())["providers"]
    assert len(list(mounted(document, "grafana", provider["options"]["path"]).glob("*.json"))) == 4
    for name in ("prometheus", "grafana"):
        (port,) = services[name]["ports"]
        assert port.startswith("127.0.0.1:")


def test_grafana_does_not_start_with_the_password_that_everyone_knows(environment: dict[str, str]) -> None:
    service = compose(environment)["services"]["grafana"]
    assert service["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == ""
    shell = [word.replace("$$", "$") for word in service["entrypoint"]]
    done = subprocess.run(shell, env={"GF_SECURITY_ADMIN_PASSWORD": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (64, "Set GRAFANA_PASSWORD in .env\n")


def test_the_image_runs_the_service_and_not_as_root(environment: dict[str, str]) -> None:
    build = compose(environment)["services"]["holdfast"]["build"]
    lines = (ROOT / build["context"] / build["dockerfile"]).read_text(encoding="utf-8").splitlines()
    instructions = [line for line in lines if line and not line.startswith("#")]
    assert 'CMD ["holdfast", "serve"]' in instructions
    assert "USER holdfast" in instructions


@pytest.fixture
def catalog(postgres: PostgresServer, environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What the postgres image makes of its environment: role and database. Yields host:port and the name's suffix."""
    settings = compose(environment)["services"]["postgres"]["environment"]
    suffix = secrets.token_hex(4)
    role, database = f"{settings['POSTGRES_USER']}_{suffix}", f"{settings['POSTGRES_DB']}_{suffix}"
    url = make_url(postgres.url_for("postgres")).set(drivername="postgresql")
    postgres.create_database(database)
    with closing(psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)) as connection:
        password = sql.Literal(settings["POSTGRES_PASSWORD"])
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), password))
        connection.execute(
            sql.SQL("ALTER DATABASE {} OWNER TO {}").format(sql.Identifier(database), sql.Identifier(role))
        )
        yield f"{url.host}:{url.port}", suffix
        postgres.drop_database(database)
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def answers(url: str) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            return httpx.get(url, timeout=5).is_success
        except httpx.HTTPError:
            return False

    return ask


def secrets_in(document: dict[str, Any], environment: Mapping[str, str], folder: Path) -> Path:
    """What the containers have at /run/secrets."""
    place = folder / "secrets"
    place.mkdir()
    for name, secret in document["secrets"].items():
        given = environment[secret["environment"]] if "environment" in secret else Path(secret["file"]).read_text()
        (place / name).write_text(given)
    return place


def succeeds(command: list[str], environment: dict[str, str]) -> Callable[[], bool]:
    return lambda: subprocess.run(command, env=environment, capture_output=True).returncode == 0


def seaweedfs_process(document: dict[str, Any], folder: Path, first_port: int, https_port: int) -> ServerProcess:
    """The service's own command; its health check's URL says when it is ready."""
    service = document["services"]["seaweedfs"]
    here = {"8334": str(https_port), "/run/secrets": str(folder / "secrets")}
    data = folder / "seaweedfs"
    data.mkdir()
    files = {}
    for config in service["configs"]:
        file = files[config["target"]] = folder / config["source"]
        content = document["configs"][config["source"]]["content"]
        for there, ours in here.items():
            content = content.replace(there, ours)
        file.write_text(content)
    ports = {flag: first_port + n for n, flag in enumerate(("s3", "master", "volume", "filer", "admin"))}
    command = []
    for word in service["command"]:
        flag = re.fullmatch(r"-(\w+)\.port=\d+", word)
        if flag:
            command.append(f"-{flag[1]}.port={ports[flag[1]]}")
        else:
            word = word.replace("=/data", f"={data}")
            for target, file in files.items():
                word = word.replace(f"={target}", f"={file}")
            command.append(word.replace("-ip.bind=0.0.0.0", "-ip.bind=127.0.0.1"))
    weed = shutil.which("weed", path=sysconfig.get_path("scripts"))
    assert weed is not None
    health = service["healthcheck"]["test"][-1].replace(":8333/", f":{first_port}/")
    own_socket = f"-filer.localSocket={folder / 'filer.sock'}"
    return ServerProcess(
        [weed, *command, own_socket], log=folder / "weed.log", ready=answers(health), cwd=folder, env=dict(os.environ)
    )


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_composed_services_work_together(
    environment: dict[str, str],
    catalog: tuple[str, str],
    tmp_path: Path,
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    postgres_address, suffix = catalog
    s3_port, https_port, port = free_ports(5, companion_offset=10_000), free_ports(), free_ports()
    environment["S3_PUBLIC_ENDPOINT"] = f"http://127.0.0.1:{s3_port}"
    over = []
    if scheme == "https":
        authority = Authority(tmp_path / "ca.pem")
        authority.sign(tmp_path / "tls.crt", tmp_path / "tls.key")
        environment |= {
            "S3_PUBLIC_ENDPOINT": f"https://127.0.0.1:{https_port}",
            "TLS_CERTIFICATE": str(tmp_path / "tls.crt"),
            "TLS_KEY": str(tmp_path / "tls.key"),
        }
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        over = [TLS]
    document = compose(environment, *over)
    secret_files = secrets_in(document, environment, tmp_path)
    weed = seaweedfs_process(document, tmp_path, s3_port, https_port)
    try:
        settings: dict[str, str] = dict(document["services"]["holdfast"]["environment"])
        url = settings["HOLDFAST_DATABASE_URL"].replace("postgres:5432", postgres_address)
        settings["HOLDFAST_DATABASE_URL"] = url.replace("holdfast@", f"holdfast_{suffix}@") + f"_{suffix}"
        settings["HOLDFAST_STORE"] = settings["HOLDFAST_STORE"].replace("seaweedfs:8333", f"127.0.0.1:{s3_port}")
        settings |= {"HOLDFAST_PORT": str(port), "HOLDFAST_DATA_DIR": str(tmp_path / "data")}
        settings = {name: value.replace("/run/secrets", str(secret_files)) for name, value in settings.items()}
        holdfast = str(Path(sysconfig.get_path("scripts")) / "holdfast")
        health = document["services"]["holdfast"]["healthcheck"]["test"][-1].replace(":8400/", f":{port}/")
        served = ServerProcess(
            [holdfast, "serve"],
            log=tmp_path / "holdfast.progress",
            ready=succeeds([sys.executable, "-c", health], without_holdfast_settings() | settings),
            env=without_holdfast_settings() | settings,
        )
        try:
            token = environment["HOLDFAST_BOOTSTRAP_TOKEN"]
            with httpx.Client(
                base_url=f"{scheme}://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}, timeout=60
            ) as http:
                assert http.get("/readyz").json()["ready"] is True
                assert http.get("/v1/service").json()["store_kind"] == "s3"
                assert Job(http).save(100)["state"] == "committed"
            log = tmp_path / "worker.log"
            program, *arguments = document["services"]["worker"]["command"]
            worker = ServerProcess(
                [str(Path(holdfast).with_name(program)), *arguments],
                log=log,
                ready=lambda: "works as" in log.read_text(),
                env=without_holdfast_settings() | settings,
            )
            try:
                with Client(ClientSettings(url=f"{scheme}://127.0.0.1:{port}", token=token)) as client:
                    asked = client.controllers.run("collect")
                    client.controllers.wait(asked, timeout_seconds=60)
                    assert {one.kind for one in client.controllers.workers()} == {"serve", "worker"}
            finally:
                worker.stop()
            logs = served.log_text + worker.log_text
            assert token not in logs
            assert environment["HOLDFAST_SECRETS_KEY"] not in logs
        finally:
            served.stop()
    finally:
        weed.stop()
