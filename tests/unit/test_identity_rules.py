"""The identity file: what it takes, what it refuses with which sentence, and what its rules give to which claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Role, Scope
from holdfast_service.errors import ProblemError
from holdfast_service.identity.rules import (
    SCOPES_OF_ROLE,
    Decision,
    Grant,
    IdentityFileError,
    IdentityRules,
    decide,
    grants_of,
    parse_rules,
    read_rules,
)

CLUSTER = {"name": "cluster", "issuer": "https://cluster.example.org", "audiences": ["holdfast"]}
GITHUB = {"name": "github", "issuer": "https://token.actions.githubusercontent.com", "audiences": ["holdfast"]}
PEOPLE = {"name": "people", "issuer": "https://sso.example.org", "client_id": "holdfast-page", "groups_claim": "roles"}


def rule(**changes: Any) -> dict[str, Any]:
    whole = {"name": "r", "provider": "cluster", "role": "trainer", "projects": ["demo"]} | changes
    return whole if {"claims", "groups", "everyone"} & set(changes) else whole | {"claims": {"sub": "exactly"}}


def file(*rules: dict[str, Any], providers: Any = (CLUSTER, GITHUB, PEOPLE)) -> IdentityRules:
    return parse_rules(json.dumps({"providers": list(providers), "rules": list(rules)}).encode())


def fits(said: dict[str, Any], /, provider: str = "cluster", **of_rule: Any) -> bool:
    rules = file(rule(provider=provider, **of_rule))
    found = rules.provider(provider)
    assert found is not None
    return bool(grants_of(rules, found, said))


ACCOUNT = "system:serviceaccount:team-a:trainer"
BRANCH = "repo:org/name:ref:refs/heads/main"


@pytest.mark.parametrize(
    ("pattern", "value", "expected"),
    [
        (ACCOUNT, ACCOUNT, True),
        (ACCOUNT, ACCOUNT + "2", False),
        (ACCOUNT, "x" + ACCOUNT, False),
        (ACCOUNT, ACCOUNT + "\n", False),
        ("system:serviceaccount:team-a:*", ACCOUNT, True),
        ("system:serviceaccount:team-a:*", "system:serviceaccount:team-ab:trainer", False),
        ("system:serviceaccount:*:trainer", ACCOUNT, True),
        # What a colon ends, a star does not go past: some parts of a subject its holder may name.
        ("system:serviceaccount:*", ACCOUNT, False),
        ("repo:org/*:ref:refs/heads/main", BRANCH, True),
        ("repo:org/*:ref:refs/heads/main", "repo:org/name:environment:x:ref:refs/heads/main", False),
        ("repo:org/name:ref:refs/heads/*", "repo:org/name:ref:refs/heads/topic/one", True),
        ("repo:org/name:ref:refs/heads/*", "repo:org/name:pull_request", False),
        ("a.c", "abc", False),  # no regular expression
        ("*@example.org", "ann@example.org", True),
        ("*@example.org", "ann@example.org.evil", False),
        (["other", BRANCH], BRANCH, True),
        (["other", "another"], BRANCH, False),
        (BRANCH, [BRANCH, "more"], True),
        (BRANCH, [[BRANCH]], False),
        (BRANCH, None, False),
        (BRANCH, {"sub": BRANCH}, False),
        (True, True, True),
        (True, "true", False),
        (True, 1, False),
        (1, True, False),
        (42, 42, True),
        ("42", 42, False),
    ],
)
def test_a_claim_fits_word_for_word_or_by_a_star_that_ends_at_a_colon(pattern: Any, value: Any, expected: bool) -> None:
    assert fits({"sub": value}, claims={"sub": pattern}) is expected


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"roles": ["ml", "other"], "hd": "example.org"}, True),
        ({"roles": "ml", "hd": "example.org"}, True),
        ({"roles": ["ml-2"], "hd": "example.org"}, False),
        ({"roles": ["ml"]}, False),
        ({"groups": ["ml"], "hd": "example.org"}, False),  # this provider has them in another claim
        ({"roles": [["ml"], 1], "hd": "example.org"}, False),
        ({"hd": "example.org"}, False),
    ],
)
def test_a_rule_needs_all_its_claims_and_one_of_its_groups(claims: dict[str, Any], expected: bool) -> None:
    assert fits(claims, provider="people", claims={"hd": "example.org"}, groups=["ml", "ml-team"]) is expected


def test_a_rule_is_for_its_own_provider_alone() -> None:
    rules = file(rule(provider="cluster", claims={"sub": "x"}))
    assert [bool(grants_of(rules, provider, {"sub": "x"})) for provider in rules.providers] == [True, False, False]


def test_for_everyone_of_a_provider_it_must_say_so() -> None:
    assert fits({"sub": "anybody"}, everyone=True)
    for of_rule in ({"claims": {"sub": "*"}}, {"claims": {"sub": ["a", "*:*"]}}, {"groups": ["**"]}):
        with pytest.raises(IdentityFileError, match="fits everything; say `everyone: true`"):
            file(rule(**of_rule))
    with pytest.raises(IdentityFileError, match="say whom it is for"):
        file(rule(claims={}))
    with pytest.raises(IdentityFileError, match="say whom it is for"):
        file(rule(everyone=True, claims={"sub": "x"}))


def test_each_role_has_its_scopes() -> None:
    assert {role: sorted(scopes) for role, scopes in SCOPES_OF_ROLE.items()} == {
        Role.READER: ["read"],
        Role.TRAINER: ["read", "train"],
        Role.OPERATOR: ["metrics", "operate", "read"],
        Role.ADMIN: ["admin", "metrics", "operate", "read", "train"],
    }


def grant(role: Role, project: str | None = "demo", seconds: int = 3600, *, once: bool = False) -> Grant:
    return Grant(f"{role} on {project}", role, project, seconds, once)


READER, TRAINER, OPERATOR, ADMIN = Role
DEMO_TRAINER, DEMO_READER = grant(TRAINER), grant(READER, seconds=600)


def decided(*grants: Grant, **asked: Any) -> tuple[str | None, tuple[Role, ...], int, bool]:
    made: Decision = decide(grants, **asked)
    assert made.scopes == frozenset().union(*(SCOPES_OF_ROLE[role] for role in made.roles))
    return made.project, made.roles, made.longest_seconds, made.once


def test_a_token_has_what_all_fitting_rules_give_for_as_long_as_the_shortest_says() -> None:
    assert decided(DEMO_TRAINER) == ("demo", (TRAINER,), 3600, False)
    assert decided(DEMO_TRAINER, DEMO_READER) == ("demo", (READER, TRAINER), 600, False)
    assert decided(DEMO_TRAINER, grant(OPERATOR, once=True)) == ("demo", (OPERATOR, TRAINER), 3600, True)
    assert decide([DEMO_TRAINER, grant(OPERATOR)]).scopes == {Scope.READ, Scope.TRAIN, Scope.OPERATE, Scope.METRICS}


def test_a_token_has_the_least_limits_of_the_rules_that_give_it() -> None:
    rules = file(
        rule(name="one", requests_per_second=5, concurrent_requests=8),
        rule(name="two", role="reader", requests_per_second=0.5),
        rule(name="three", projects=["other"], concurrent_requests=4),
    )
    provider = rules.provider("cluster")
    assert provider is not None
    grants = grants_of(rules, provider, {"sub": "exactly"})
    for project, role, limits in (("demo", None, (0.5, 8)), ("other", None, (None, 4)), ("demo", TRAINER, (5, 8))):
        made = decide(grants, project=project, role=role)
        assert (made.requests_per_second, made.concurrent_requests) == limits, (project, role)


def test_a_narrower_role_can_be_asked_for_and_no_other() -> None:
    admin = grant(ADMIN, seconds=60, once=True)
    assert decided(admin, role=READER) == ("demo", (READER,), 60, True)
    assert decided(admin, DEMO_TRAINER, DEMO_READER, role=READER) == ("demo", (READER,), 3600, False), "one is enough"
    for given, asked in ((TRAINER, OPERATOR), (OPERATOR, TRAINER), (READER, TRAINER), (OPERATOR, ADMIN)):
        with pytest.raises(ProblemError) as caught:
            decide([grant(given)], role=asked)
        assert caught.value.code is ProblemCode.IDENTITY_NOT_GRANTED
        assert f"the role {asked}" in caught.value.detail
        assert f"It has: {given} on demo" in caught.value.detail


def test_a_token_is_for_one_project_or_for_every_one() -> None:
    everywhere, other = grant(READER, None), grant(TRAINER, "other")
    assert decided(everywhere) == (None, (READER,), 3600, False)
    assert decided(everywhere, project="any") == ("any", (READER,), 3600, False)
    assert decided(everywhere, other) == (None, (READER,), 3600, False), "what is for one project is not for every one"
    assert decided(everywhere, other, project="other") == ("other", (READER, TRAINER), 3600, False)
    with pytest.raises(ProblemError) as caught:
        decide([DEMO_TRAINER, other])
    assert caught.value.code is ProblemCode.IDENTITY_PROJECT_NEEDED
    assert caught.value.context == {"projects": ["demo", "other"]}
    assert "HOLDFAST_IDENTITY_PROJECT" in caught.value.detail
    with pytest.raises(ProblemError) as caught:
        decide([DEMO_TRAINER], project="other")
    assert caught.value.code is ProblemCode.IDENTITY_NOT_GRANTED


def test_who_fits_no_rule_gets_nothing() -> None:
    with pytest.raises(ProblemError) as caught:
        decide([], project="demo", role=READER)
    assert caught.value.code is ProblemCode.IDENTITY_NOT_GRANTED


def provider(**changes: Any) -> list[dict[str, Any]]:
    whole = CLUSTER | changes
    return [{name: value for name, value in whole.items() if value is not None}]


@pytest.mark.parametrize(
    ("providers", "rules", "told"),
    [
        (provider(isuer="x"), [], r"providers\[0\]\.isuer: there is no such key"),
        (provider(), [rule(project="demo")], r"rules\[0\]\.project: there is no such key"),
        (provider(), [rule(role="owner")], r"rules\[0\]\.role: Input should be 'reader'"),
        (provider(), [rule(claims={"sub": {"x": 1}})], r"rules\[0\]\.claims\.sub: "),
        (provider(), [rule(claims={"sub": []})], r"rules\[0\]\.claims\.sub: "),
        (provider(), [rule(projects=["a/b"])], r"rules\[0\]\.projects\[0\]: "),
        (provider(), [rule(every_project=True)], "say where: either `projects` or `every_project: true`"),
        (provider(), [rule(projects=[])], "say where"),
        (provider(), [rule(every_project="yes", projects=[])], r"rules\[0\]\.every_project"),
        (provider(), [rule(longest_seconds=31 * 86400)], r"rules\[0\]\.longest_seconds"),
        (provider(), [rule(requests_per_second=0)], r"rules\[0\]\.requests_per_second"),
        (provider(), [rule(concurrent_requests=3)], r"rules\[0\]\.concurrent_requests"),
        (provider(), [rule(), rule()], "two rules have the name r"),
        (provider(), [rule(provider="nobody")], "is for the provider nobody, which is not listed"),
        ([*provider(), *provider()], [], "two providers have the name cluster"),
        ([*provider(), *provider(name="b")], [], "two providers have the issuer https://cluster"),
        (provider(issuer="http://cluster.example.org"), [], "it must begin with https://"),
        (provider(issuer="http://localhost.example.org"), [], "it must begin with https://"),
        (provider(issuer="https://user@cluster.example.org"), [], "without user, query and fragment"),
        (provider(jwks_url="http://10.0.0.1/keys"), [], r"providers\[0\]\.jwks_url: it must begin with https://"),
        (provider(audiences=None), [], "a token for others is none"),
        (provider(algorithms=["HS256"]), [], "not HS256"),
        (provider(algorithms=["none"]), [], "not none"),
        (provider(algorithms=[]), [], "none is named"),
        (provider(ca_file="ca.pem"), [], "it must be an absolute path"),
        (provider(clock_skew_seconds=301), [], r"providers\[0\]\.clock_skew_seconds"),
        ([], [], r"providers: List should have at least 1 item"),
    ],
)
def test_a_mistake_is_told_with_its_place(providers: Any, rules: Any, told: str) -> None:
    with pytest.raises(IdentityFileError, match=told):
        file(*rules, providers=providers)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("providers: []\nproviders: []\n", "line 2: the key 'providers' is there twice"),
        ("a: &x [1]\nb: *x\n", "line 2: aliases are not taken"),
        ("1: x\n", "line 1: a key must be a text"),
        ("providers: [", "line 1: "),
        ("- x\n", "the file: "),
        ("", "the file: "),
        ("!!python/object/apply:os.system ['true']", "line 1: tags are not taken"),
        ("a: 1\nb: !!timestamp x\n", "line 2: tags are not taken"),
        ("a: " + "1:" * 500 + "1.5", "."),
        ("a: " + "1:" * 500_000 + "1", "line 1: a text has at most 4096 characters"),
        ("a: \x07\n", "."),
        ("[" * 5000, "."),
    ],
)
def test_what_is_no_plain_yaml_is_refused(text: str, told: str) -> None:
    with pytest.raises(IdentityFileError, match=told):
        parse_rules(text.encode())


def test_a_file_that_is_not_there_or_too_large_is_told(tmp_path: Path) -> None:
    with pytest.raises(IdentityFileError, match="cannot be read"):
        read_rules(tmp_path / "none.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(IdentityFileError, match="more than 1048576 bytes"):
        read_rules(large)


def test_the_file_of_the_documentation_is_one() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "operating" / "identity.md"
    blocks = [part.partition("```")[0] for part in page.read_text(encoding="utf-8").split("```yaml\n")[1:]]
    whole = next(block for block in blocks if block.startswith("providers:"))
    rules = parse_rules(whole.encode())
    assert {each.name for each in rules.providers} == {"cluster-a", "github", "gitlab", "google", "people"}
    assert {each.provider for each in rules.rules} == {each.name for each in rules.providers}
