"""Writes tests/terraform/schemas/*.json: which arguments and blocks the providers of Terraform know, for the types that
deploy/terraform uses. `python -m scripts.terraform_schemas` after a new type; it fetches some 80 MB from npm.

The source are HashiCorp's bindings for cdktf, which are generated from a provider's own schema. Each field of them
names the argument that it stands for.
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TERRAFORM = ROOT / "deploy" / "terraform"
SCHEMAS = ROOT / "tests" / "terraform" / "schemas"
# The last bindings of the major version of the provider that versions.tf allows first.
PACKAGES = {"aws": ("@cdktf/provider-aws", "19.65.1"), "gcp": ("@cdktf/provider-google", "16.12.1")}
_USED = re.compile(r'^(resource|data) "((?:aws|google)_\w+)"', re.MULTILINE)
_INTERFACE = re.compile(r"^export interface (\w+)[^{]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"/\*\*((?:(?!\*/).)*)\*/\s+readonly \w+(\??): (\w*)", re.DOTALL)
_NAME = re.compile(r"#\w+ \w+#(\w+)\}")
_PROVIDER = re.compile(r"registry\.terraform\.io/providers/(\w+/\w+)/([\d.]+)/")
_RESOURCE_CLASS = re.compile(
    r"^export declare class \w+ extends cdktf\.Terraform(?:Resource|DataSource) \{(.*?)^\}", re.M | re.S
)


def used(cloud: str) -> list[tuple[str, str]]:
    """`resource` or `data` and the type, of everything that the module of this cloud has."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((TERRAFORM / cloud).rglob("*.tf"))]
    return sorted({found for text in texts for found in _USED.findall(text)})


def schema_of(text: str) -> dict[str, Any]:
    """Of one type, by the declarations of its binding."""
    interfaces = dict(_INTERFACE.findall(text))
    (config,) = (name for name in interfaces if f"interface {name} extends cdktf.TerraformMetaArguments" in text)
    (own,) = _RESOURCE_CLASS.findall(text)
    getters = re.findall(r"^    get (\w+)\(\)", own, re.MULTILINE)
    attributes = {
        re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", each).lower() for each in getters if not each.endswith("Input")
    }
    return _block(interfaces, config) | {"attributes": sorted(attributes)}


def _block(interfaces: dict[str, str], name: str) -> dict[str, Any]:
    arguments: dict[str, bool] = {}
    blocks: dict[str, Any] = {}
    required_blocks = []
    for comment, optional, kind in _FIELD.findall(interfaces[name]):
        (argument,) = _NAME.findall(comment)
        if f"* {argument} block" in comment:
            blocks[argument] = _block(interfaces, kind)
            required_blocks += [] if optional else [argument]
        else:
            arguments[argument] = not optional
    return {
        "optional": sorted(each for each, is_required in arguments.items() if not is_required),
        "required": sorted([*(each for each, is_required in arguments.items() if is_required), *required_blocks]),
        "blocks": blocks,
    }


def made(cloud: str, archive: Path) -> dict[str, Any]:
    """The schema's file, of the package as npm gives it."""
    package, version = PACKAGES[cloud]
    types: dict[str, Any] = {"resource": {}, "data": {}}
    with tarfile.open(archive) as bindings:
        for kind, name in used(cloud):
            folder = name.partition("_")[2].replace("_", "-")
            folder = folder if kind == "resource" else f"data-{name.replace('_', '-')}"
            member = bindings.extractfile(f"package/lib/{folder}/index.d.ts")
            assert member is not None
            text = member.read().decode()
            assert f'tfResourceType = "{name}"' in text, name
            types[kind][name] = schema_of(text)
            provider, of_version = _PROVIDER.findall(text)[0]
    return {"source": {"provider": f"{provider} {of_version}", "bindings": f"{package} {version}"}, **types}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for cloud, (package, version) in PACKAGES.items():
            done = subprocess.run(
                ["npm", "pack", "--silent", f"{package}@{version}"],
                cwd=folder,
                check=True,
                capture_output=True,
                text=True,
            )
            document = made(cloud, Path(folder, done.stdout.strip()))
            text = json.dumps(document, indent=1, sort_keys=True) + "\n"
            (SCHEMAS / f"{cloud}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
