"""deploy/sbom.cdx.json is a CycloneDX document, and lists what is locked."""

from __future__ import annotations

import base64
import json
import tomllib
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from scripts.supply_chain.bill import BILL, WEB_LOCK, wanted
from scripts.supply_chain.lock import LOCK, ROOT, pins_of

REMEDY = "run `make sbom`"
BILL_TEXT = BILL.read_text(encoding="utf-8")
DOCUMENT: dict[str, Any] = json.loads(BILL_TEXT)
COMPONENTS = {each["purl"]: each for each in DOCUMENT["components"]}
FOR_SOME = {address for address, each in COMPONENTS.items() if "holdfast:marker" in json.dumps(each)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def hashes(of: list[dict[str, str]]) -> set[str]:
    return {each["content"] for each in of}


def test_it_is_what_cyclonedx_says_such_a_document_is() -> None:
    assert DOCUMENT["specVersion"] == "1.6"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(BILL_TEXT) is None


def test_it_lists_each_package_of_the_lock_with_its_hashes_and_no_other() -> None:
    pins = {f"pkg:pypi/{pin.name}@{pin.version}": pin for pin in pins_of(LOCK.read_text(encoding="utf-8"))}
    assert pins.keys() == {address for address in COMPONENTS if address.startswith("pkg:pypi/")}, REMEDY
    for address, pin in pins.items():
        (files,) = COMPONENTS[address]["externalReferences"]
        assert hashes(files["hashes"]) == set(pin.hashes), REMEDY


def test_it_lists_each_package_of_the_page_with_its_hash_and_no_other() -> None:
    expected = {}
    for place, package in json.loads(WEB_LOCK.read_text(encoding="utf-8"))["packages"].items():
        if place and not package.get("dev") and not package.get("devOptional"):
            name = place.rpartition("node_modules/")[2].replace("@", "%40")
            digest = base64.b64decode(package["integrity"].removeprefix("sha512-")).hex()
            expected[f"pkg:npm/{name}@{package['version']}"] = {digest}
    found = {address: hashes(each["hashes"]) for address, each in COMPONENTS.items() if address.startswith("pkg:npm/")}
    assert found == expected, REMEDY


def test_it_says_what_needs_what_and_all_of_it_is_needed() -> None:
    needs = {each["ref"]: set(each.get("dependsOn", ())) for each in DOCUMENT["dependencies"]}
    itself = DOCUMENT["metadata"]["component"]["purl"]
    assert itself == f"pkg:pypi/holdfast@{PROJECT['version']}", REMEDY
    direct = {COMPONENTS[each]["name"] for each in needs[itself] if each.startswith("pkg:pypi/")}
    assert direct == {each.name for each in wanted(PROJECT)}, REMEDY
    reached, left = set(), {itself}
    while left:
        reached |= left
        left = {inner for each in left for inner in needs[each]} - reached
    assert COMPONENTS.keys() - reached <= FOR_SOME, REMEDY
    assert reached - {itself} <= COMPONENTS.keys()


def test_it_says_each_licence_but_of_what_other_platforms_need() -> None:
    assert {address for address, each in COMPONENTS.items() if not each.get("licenses")} <= FOR_SOME, REMEDY


def test_it_says_nothing_of_where_and_when_it_was_made() -> None:
    """The same lock gives the same file, on whatever machine."""
    assert "timestamp" not in DOCUMENT["metadata"]
    assert BILL_TEXT.count("://") == 1
    assert DOCUMENT["$schema"].startswith("http://cyclonedx.org/schema/")
