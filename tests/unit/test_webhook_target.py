"""Where a webhook may call, what proves that a call is ours, and when one that failed is made again."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Sequence

import pytest

from holdfast_service.webhooks.deliver import MOST_TRIES, pause_seconds, shown, signature
from holdfast_service.webhooks.target import RefusedTargetError, find_target, is_public

PUBLIC = ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8"]
OURS = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",  # the metadata of a cloud
    "127.0.0.1",
    "127.1.2.3",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:a9fe:a9fe",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "100::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", OURS)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


def _answers(*addresses: str) -> Sequence[str]:
    return addresses


def test_a_name_is_refused_if_one_of_its_addresses_is_not_public() -> None:
    found = find_target("https://a.example/hook?x=1", (), lambda host, port: _answers("8.8.8.8", "8.8.4.4", "8.8.8.8"))
    assert (found.host, found.port, found.path, found.tls) == ("a.example", 443, "/hook?x=1", True)
    assert found.addresses == ("8.8.8.8", "8.8.4.4")
    for addresses in (("8.8.8.8", "10.0.0.1"), ("fe80::1%eth0",), ("::ffff:127.0.0.1",)):
        with pytest.raises(RefusedTargetError, match="not public"):
            find_target("https://a.example/", (), lambda host, port, found=addresses: found)
    with pytest.raises(OSError, match="no address"):
        find_target("https://a.example/", (), lambda host, port: ())


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://0/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fe80::1%25lo]/",
        "https://localhost/",
        "https://localhost./",
        "https://LOCALHOST:8400/",
    ],
)
def test_other_ways_to_write_this_machine_are_refused(url: str) -> None:
    """As this machine's own resolver reads them; one that does not know a form finds no such name."""
    with pytest.raises((RefusedTargetError, OSError)):
        find_target(url, ())


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/",
        "ftp://a.example/",
        "file:///etc/passwd",
        "gopher://a.example/",
        "//a.example/",
        "https:///hook",
        "https://",
        "https://user@a.example/",
        "https://user:secret@a.example/",
        "https://a.example:port/",
        "https://a.example:99999/",
        "https://[::1/",
        "https://a.example/\r\nHost: b.example",
        "https://a.example\\@b.example/",
        "https://ⓛocalhost/",
        "https://a.example /",
        f"https://{'a' * 64}.example/",
        "https://a..example/",
        "https://.example/",
    ],
)
def test_urls_that_are_refused_before_any_name_is_resolved(url: str) -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(f"{host} was resolved")

    with pytest.raises(RefusedTargetError) as refused:
        find_target(url, ("b.example",), resolve)
    assert "secret" not in str(refused.value)


def test_what_an_operator_allows_may_be_called_where_it_is() -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        return ("10.0.0.7",)

    allowed = frozenset({"alerts.corp", "bot.corp:8080", "[fd00::7]:80"})
    assert find_target("http://Alerts.corp./x", allowed, resolve).addresses == ("10.0.0.7",)
    assert find_target("http://alerts.corp:1234/x", allowed, resolve).port == 1234
    assert find_target("http://bot.corp:8080/", allowed, resolve).port == 8080
    assert find_target("http://[fd00::7]/", allowed, lambda host, port: ("fd00::7",)).host == "fd00::7"
    for url in ("http://bot.corp/", "http://x.alerts.corp/", "http://alerts.corp.evil.example/"):
        with pytest.raises(RefusedTargetError, match="https"):
            find_target(url, allowed, resolve)
    with pytest.raises(RefusedTargetError, match="not public"):
        find_target("https://bot.corp/", allowed, resolve)


def test_a_signature_is_as_libraries_of_the_specification_check_it() -> None:
    """The example of the specification's own libraries."""
    text = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    secret = base64.b64decode(text)
    assert shown(secret) == f"whsec_{text}"
    made = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_call_is_tried_for_about_a_day_ever_more_seldom() -> None:
    pauses = [pause_seconds(tries, jitter=0.0) for tries in range(1, MOST_TRIES)]
    assert pauses[:4] == [5, 20, 80, 320]
    assert pauses == sorted(pauses, key=lambda pause: pause or 0)
    assert 20 * 3600 < sum(pause or 0 for pause in pauses) < 30 * 3600
    assert pause_seconds(MOST_TRIES) is None
    assert 4 <= (pause_seconds(1) or 0) <= 6
