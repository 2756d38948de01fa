"""Each argument, block and attribute is one that the provider knows, by the schemas that scripts/terraform_schemas.py
has taken from bindings which are generated from the provider's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from scripts.terraform_schemas import PACKAGES, SCHEMAS, schema_of, used

from tests.terraform.modules import asked_for, files

CLOUDS = pytest.mark.parametrize("cloud", sorted(PACKAGES))
OF_TERRAFORM = {"count", "for_each", "provider", "depends_on", "lifecycle"}
_REFERENCE = re.compile(r"(?<![\w.])(data\.)?((?:aws|google)_\w+)\.\w+(?:\[[^\]]*\])?\.(\w+)")


def schemas(cloud: str) -> dict[str, Any]:
    return dict(json.loads((SCHEMAS / f"{cloud}.json").read_text(encoding="utf-8")))


def unknown(body: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    """What of a block its provider would refuse: names that it does not know or misses, and values for blocks."""
    blocks = {name: value for name, value in body.items() if name != "dynamic"}
    for each in body.get("dynamic", ()):
        blocks |= {name: dynamic["content"] for name, dynamic in each.items()}
    for name, value in blocks.items():
        if name in schema["blocks"]:
            if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
                yield f"{place}.{name} is a block"
                continue
            for inner in value:
                yield from unknown(inner, schema["blocks"][name], f"{place}.{name}")
        elif name not in {*schema["optional"], *schema["required"]}:
            yield f"{place}.{name} is not known"
    yield from (f"{place}.{name} is missing" for name in schema["required"] if name not in blocks)


@CLOUDS
def test_the_schemas_are_of_what_is_used_and_of_the_versions_that_are_named(cloud: str) -> None:
    document = schemas(cloud)
    assert {(what, kind) for what in ("resource", "data") for kind in document[what]} == set(used(cloud))
    assert document["source"]["bindings"] == " ".join(PACKAGES[cloud])


@CLOUDS
def test_the_provider_knows_each_argument_and_misses_none(cloud: str) -> None:
    document = schemas(cloud)
    found = list(asked_for(cloud))
    assert len(found) > 15
    wrong = [
        each
        for what, block in found
        for each in unknown(
            {name: value for name, value in block.body.items() if name not in OF_TERRAFORM},
            document[what][block.kind],
            f"{block.kind}.{block.name}",
        )
    ]
    assert wrong == []


@CLOUDS
def test_what_is_read_of_a_resource_is_an_attribute_of_it(cloud: str) -> None:
    document = schemas(cloud)
    references = {each for path in files(cloud) for each in _REFERENCE.findall(path.read_text(encoding="utf-8"))}
    assert len(references) > 10
    assert not {
        (kind, attribute)
        for is_data, kind, attribute in references
        if attribute not in document["data" if is_data else "resource"][kind]["attributes"]
    }


def test_a_wrong_name_a_missing_one_and_a_value_for_a_block_are_seen() -> None:
    bucket = schemas("gcp")["resource"]["google_storage_bucket"]
    rule = {"action": [{"typ": "Delete"}], "condition": [{"age": 7}]}
    body = {"name": "b", "lifecycle_rule": [rule], "versioning": {"enabled": True}, "locked": True}
    assert sorted(unknown(body, bucket, "b")) == [
        "b.lifecycle_rule.action.typ is not known",
        "b.lifecycle_rule.action.type is missing",
        "b.location is missing",
        "b.locked is not known",
        "b.versioning is a block",
    ]


def test_a_schema_is_read_from_a_binding() -> None:
    def field(name: str, kind: str, remark: str = "") -> str:
        link = f"{{@link https://x/y#{name} Thing#{name}}}"
        return f"    /**\n    * {remark}\n    *\n    * {link}\n    */\n    readonly x{kind};\n"

    config = field("big_name", ": string") + field("labels", "?: {\n        [key: string]: string;\n    }")
    text = (
        f"export interface ThingConfig extends cdktf.TerraformMetaArguments {{\n{config}"
        f"{field('rule', ': ThingRule[] | cdktf.IResolvable', 'rule block')}}}\n"
        f"export interface ThingRule {{\n{field('days', '?: number')}}}\n"
        "export declare class Thing extends cdktf.TerraformResource {\n"
        "    get selfLink(): string;\n    get bigName(): string;\n    get bigNameInput(): string | undefined;\n}\n"
    )
    assert schema_of(text) == {
        "required": ["big_name", "rule"],
        "optional": ["labels"],
        "blocks": {"rule": {"required": [], "optional": ["days"], "blocks": {}}},
        "attributes": ["big_name", "self_link"],
    }
