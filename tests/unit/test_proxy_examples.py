"""deploy/nginx, deploy/envoy and deploy/traefik keep to the service's own limits. Envoy and Traefik are parsed here and
not run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_protocol.base import Request
from holdfast_protocol.checkpoints import MAX_CHUNK_BYTES, SealShard
from holdfast_service.events.endpoints import _QUIET_SECONDS
from holdfast_service.serve import _KEEP_ALIVE_SECONDS
from holdfast_service.settings import ServiceSettings
from holdfast_service.training.endpoints import LONGEST_WAIT_SECONDS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LARGEST_CALL = 16 * 1024**2


def test_a_seal_is_the_largest_call() -> None:
    def every(model: type[Request]) -> list[type[Request]]:
        return [model, *(each for below in model.__subclasses__() for each in every(below))]

    assert max(model.largest_body_bytes for model in every(Request)) == SealShard.largest_body_bytes == LARGEST_CALL


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


class TestNginx:
    text = (DEPLOY / "nginx" / "nginx.conf").read_text()

    def within(self, block: str) -> str:
        """The directives of a location, without those of others."""
        return re.search(rf"location {re.escape(block)} {{(.*?)\n        }}", self.text, re.DOTALL).group(1)  # type: ignore[union-attr]

    def test_its_times_are_longer_than_what_the_service_waits(self) -> None:
        read = seconds(re.search(r"\n        proxy_read_timeout (\w+);", self.text).group(1))  # type: ignore[union-attr]
        assert read > max(LONGEST_WAIT_SECONDS, _QUIET_SECONDS)
        upstream = re.search(r"upstream holdfast {(.*?)}", self.text, re.DOTALL).group(1)  # type: ignore[union-attr]
        assert seconds(re.search(r"keepalive_timeout (\w+);", upstream).group(1)) < _KEEP_ALIVE_SECONDS  # type: ignore[union-attr]

    def test_its_bodies_are_as_large_as_the_services(self) -> None:
        assert "\n        client_max_body_size 16m;" in self.text
        assert 16 * 1024**2 == LARGEST_CALL
        chunks = self.within("/v1/objects/")
        assert {"client_max_body_size 5g;", "proxy_request_buffering off;"} <= {
            line.strip() for line in chunks.split("\n")
        }
        assert 5 * 1024**3 == MAX_CHUNK_BYTES
        assert "proxy_buffering off;" in self.within("= /v1/events/stream")


class TestEnvoy:
    @pytest.fixture
    def listener(self) -> Any:
        return self.whole["static_resources"]["listeners"][0]["filter_chains"][0]

    whole = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())

    @pytest.fixture
    def http(self, listener: Any) -> Any:
        (manager,) = listener["filters"]
        return manager["typed_config"]

    def test_every_part_names_its_type(self) -> None:
        def configured(node: Any) -> list[dict[str, Any]]:
            if isinstance(node, list):
                return [found for each in node for found in configured(each)]
            if not isinstance(node, dict):
                return []
            below = [found for each in node.values() for found in configured(each)]
            return [node["typed_config"], *below] if "typed_config" in node else below

        found = configured(self.whole)
        assert len(found) == 6
        assert all(each["@type"].startswith("type.googleapis.com/envoy.extensions.") for each in found)

    def test_it_takes_the_callers_address_from_the_connection_and_says_so(self, http: Any) -> None:
        assert (http["use_remote_address"], http["xff_num_trusted_hops"]) == (True, 0)

    def test_it_is_strict(self, listener: Any, http: Any) -> None:
        assert http["http_protocol_options"] == {"allow_chunked_length": False, "accept_http_10": False}
        tls = listener["transport_socket"]["typed_config"]["common_tls_context"]
        assert tls["alpn_protocols"] == ["h2", "http/1.1"]
        assert "REQ_WITHOUT_QUERY" in str(http["access_log"])

    def test_its_times_and_bodies_are_those_of_the_service(self, http: Any) -> None:
        buffer, router = http["http_filters"]
        assert buffer["typed_config"]["max_request_bytes"] == LARGEST_CALL
        assert router["name"] == "envoy.filters.http.router"
        (host,) = http["route_config"]["virtual_hosts"]
        events, chunks, others = host["routes"]
        assert (events["match"], events["route"]["timeout"]) == ({"path": "/v1/events/stream"}, "0s")
        assert seconds(events["route"]["idle_timeout"]) > _QUIET_SECONDS
        assert (chunks["match"], chunks["route"]["timeout"]) == ({"prefix": "/v1/objects/"}, "0s")
        assert chunks["typed_per_filter_config"]["envoy.filters.http.buffer"]["disabled"] is True
        assert seconds(others["route"]["timeout"]) > LONGEST_WAIT_SECONDS
        assert seconds(http["stream_idle_timeout"]) > LONGEST_WAIT_SECONDS

    def test_it_speaks_http_1_to_the_service_and_keeps_connections(self) -> None:
        (cluster,) = self.whole["static_resources"]["clusters"]
        (options,) = cluster["typed_extension_protocol_options"].values()
        assert "http_protocol_options" in options["explicit_http_config"]
        assert seconds(options["common_http_protocol_options"]["idle_timeout"]) < _KEEP_ALIVE_SECONDS
        assert cluster["circuit_breakers"]["thresholds"][0]["max_requests"] > ServiceSettings().project_long_polls


class TestTraefik:
    static = yaml.safe_load((DEPLOY / "traefik" / "traefik.yml").read_text())
    routes = yaml.safe_load((DEPLOY / "traefik" / "holdfast.yml").read_text())

    def test_it_believes_nobody_and_logs_no_query(self) -> None:
        entry = self.static["entryPoints"]["https"]
        assert entry["forwardedHeaders"] == {"insecure": False, "trustedIPs": []}
        assert self.static["accessLog"]["fields"]["names"]["RequestPath"] == "drop"

    def test_its_times_are_those_of_the_service(self) -> None:
        entry = self.static["entryPoints"]["https"]["transport"]["respondingTimeouts"]
        assert seconds(entry["readTimeout"]) >= ServiceSettings().longest_upload_seconds
        assert seconds(entry["writeTimeout"]) == 0
        transport = self.routes["http"]["serversTransports"]["holdfast"]
        assert seconds(transport["forwardingTimeouts"]["responseHeaderTimeout"]) > LONGEST_WAIT_SECONDS
        assert seconds(transport["forwardingTimeouts"]["idleConnTimeout"]) < _KEEP_ALIVE_SECONDS
        assert transport["disableHTTP2"] is True

    def test_every_part_that_is_named_is_there_and_only_calls_have_whole_bodies(self) -> None:
        http = self.routes["http"]
        for router in http["routers"].values():
            assert set(router["middlewares"]) <= http["middlewares"].keys()
            assert router["service"] in http["services"]
            assert router["entryPoints"] == list(self.static["entryPoints"])
            assert router["tls"]["options"] in self.routes["tls"]["options"]
        assert http["services"]["holdfast"]["loadBalancer"]["serversTransport"] in http["serversTransports"]
        assert http["middlewares"]["whole-bodies"]["buffering"]["maxRequestBodyBytes"] == LARGEST_CALL
        whole = {name for name, router in http["routers"].items() if "whole-bodies" in router["middlewares"]}
        assert whole == {"calls"}
        priorities = {name: router["priority"] for name, router in http["routers"].items()}
        assert min(priorities, key=priorities.__getitem__) == "calls"
