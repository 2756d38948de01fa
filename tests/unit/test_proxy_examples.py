"""The times of deploy/nginx, deploy/envoy and deploy/traefik fit those of the service.

tests/service/test_reverse_proxies.py runs all three, and waits for none of these times.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from holdfast_protocol.base import Request
from holdfast_protocol.checkpoints import MAX_CHUNK_BYTES, SealShard
from holdfast_service.events.endpoints import _QUIET_SECONDS
from holdfast_service.serve import _KEEP_ALIVE_SECONDS
from holdfast_service.settings import ServiceSettings
from holdfast_service.training.endpoints import LONGEST_WAIT_SECONDS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LONGEST_QUIET_SECONDS = max(LONGEST_WAIT_SECONDS, _QUIET_SECONDS)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_a_seal_is_the_largest_call() -> None:
    def every(model: type[Request]) -> list[type[Request]]:
        return [model, *(each for below in model.__subclasses__() for each in every(below))]

    assert max(model.largest_body_bytes for model in every(Request)) == SealShard.largest_body_bytes


def test_nginx() -> None:
    text = (DEPLOY / "nginx" / "nginx.conf").read_text()
    assert all(seconds(each) > LONGEST_QUIET_SECONDS for each in re.findall(r"proxy_read_timeout (\w+);", text))
    upstream = text[text.index("upstream holdfast {") :]
    assert seconds(re.search(r"keepalive_timeout (\w+);", upstream).group(1)) < _KEEP_ALIVE_SECONDS  # type: ignore[union-attr]
    assert f"client_max_body_size {MAX_CHUNK_BYTES // 1024**3}g;" in text


def test_envoy() -> None:
    whole = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
    (manager,) = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    http = manager["typed_config"]
    (host,) = http["route_config"]["virtual_hosts"]
    *_, others = (route["route"] for route in host["routes"])
    (cluster,) = whole["static_resources"]["clusters"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert seconds(others["timeout"]) > LONGEST_WAIT_SECONDS
    assert seconds(http["stream_idle_timeout"]) > LONGEST_QUIET_SECONDS
    assert all(seconds(each["route"].get("idle_timeout", "inf")) > LONGEST_QUIET_SECONDS for each in host["routes"])
    assert seconds(options["common_http_protocol_options"]["idle_timeout"]) < _KEEP_ALIVE_SECONDS
    assert cluster["circuit_breakers"]["thresholds"][0]["max_requests"] > ServiceSettings().project_long_polls


def test_traefik() -> None:
    folder = DEPLOY / "traefik"
    static, routes = (yaml.safe_load((folder / name).read_text()) for name in ("traefik.yml", "holdfast.yml"))
    responding = static["entryPoints"]["https"]["transport"]["respondingTimeouts"]
    forwarding = routes["http"]["serversTransports"]["holdfast"]["forwardingTimeouts"]
    assert seconds(responding["readTimeout"]) >= ServiceSettings().longest_upload_seconds
    assert seconds(responding["writeTimeout"]) == 0
    assert seconds(forwarding["responseHeaderTimeout"]) > LONGEST_WAIT_SECONDS
    assert seconds(forwarding["idleConnTimeout"]) < _KEEP_ALIVE_SECONDS
