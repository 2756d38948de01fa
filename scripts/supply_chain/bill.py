"""Writes deploy/sbom.cdx.json, the bill of materials of the container image, as CycloneDX has it.

In it are the packages of deploy/requirements.lock, with their hashes, licences and what needs what, and the packages
that Vite puts into the web page, from web/package-lock.json. It depends on nothing but these: the same lock gives the
same file, so it has no time and no random number. Debian's packages of the base image are not in it, and neither is
what builds the page or the wheel: none of that is ours to choose, or in the image.
"""

from __future__ import annotations

import base64
import json
import tomllib
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from scripts.supply_chain.installed import found_in, licence_of, needed_by
from scripts.supply_chain.lock import EXTRAS, LOCK, ROOT, Pin, pins_of

BILL = ROOT / "deploy/sbom.cdx.json"
WEB_LOCK = ROOT / "web/package-lock.json"
_LICENCES = LicenseFactory()


def write(packages: Path) -> None:
    """From the folder where the lock is installed."""
    BILL.write_text(_bill(found_in(packages)), encoding="utf-8")


def _bill(installed: dict[str, Distribution]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    itself = _component("pypi", "holdfast", project["version"], project["license"])
    lock = LOCK.read_text(encoding="utf-8")
    web = WEB_LOCK.read_text(encoding="utf-8")
    bill = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, lock + web))
    bill.metadata.component = itself
    known = {pin.name: _python(pin, installed.get(pin.name)) for pin in pins_of(lock)}
    page = list(web_components(web))
    bill.components.update([*known.values(), *page])
    edges = needed_by(wanted(project), installed)
    for name, needs in edges.items():
        bill.register_dependency(known[name], [known[each] for each in sorted(needs)])
    direct = {Requirement(each).name for each in wanted_texts(project)}
    bill.register_dependency(itself, [*(known[each] for each in sorted(direct)), *page])
    document = json.loads(JsonV1Dot6(bill).output_as_string())
    del document["metadata"]["timestamp"]
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def wanted_texts(project: dict[str, object]) -> list[str]:
    """What pyproject.toml asks for in the image."""
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    core: list[str] = project["dependencies"]  # type: ignore[assignment]
    return [*core, *(each for extra in EXTRAS for each in extras[extra])]


def wanted(project: dict[str, object]) -> list[Requirement]:
    """The same, read."""
    return [Requirement(each) for each in wanted_texts(project)]


def _python(pin: Pin, found: Distribution | None) -> Component:
    """`found` is None for what other platforms need."""
    component = _component("pypi", pin.name, pin.version, licence_of(found) if found else None)
    # Of all files of the release: a component's own hashes would be those of one file.
    files = [HashType(alg=HashAlgorithm.SHA_256, content=each) for each in pin.hashes]
    address = XsUri(str(component.purl))
    component.external_references.add(
        ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=address, hashes=files)
    )
    if pin.requirement.marker:
        component.properties.add(Property(name="holdfast:marker", value=str(pin.requirement.marker)))
    return component


def web_components(lock: str) -> Iterator[Component]:
    """What the page is made of: neither what builds and tests it, nor types, which leave nothing in it."""
    for place, package in json.loads(lock)["packages"].items():
        if not place or package.get("dev") or package.get("devOptional"):
            continue
        name = place.rpartition("node_modules/")[2]
        group, _, short = name.rpartition("/")
        component = _component("npm", short, package["version"], package["license"], group or None)
        algorithm, _, digest = package["integrity"].partition("-")
        if algorithm != "sha512":
            raise ValueError(f"{name} has no SHA-512 in web/package-lock.json")
        component.hashes.add(HashType(alg=HashAlgorithm.SHA_512, content=base64.b64decode(digest).hex()))
        yield component


def _component(kind: str, name: str, version: str, licence: str | None, group: str | None = None) -> Component:
    address = PackageURL(kind, group, name, version)
    return Component(
        name=name,
        group=group,
        version=version,
        type=ComponentType.LIBRARY if name != "holdfast" else ComponentType.APPLICATION,
        purl=address,
        bom_ref=str(address),
        licenses=[_LICENCES.make_from_string(licence)] if licence else [],
    )
