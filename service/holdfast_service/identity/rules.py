"""The reviewed file of HOLDFAST_IDENTITY_FILE: which issuers are believed, and which of their claims give which role.

Pure, but for reading the file: the decision is a table of rules over the claims of a verified token.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from holdfast_protocol.base import Name
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import TokenCalls, TokenRate
from holdfast_protocol.states import Role, Scope
from holdfast_service.errors import ProblemError

SCOPES_OF_ROLE: Mapping[Role, frozenset[Scope]] = {
    Role.READER: frozenset({Scope.READ}),
    Role.TRAINER: frozenset({Scope.READ, Scope.TRAIN}),
    Role.OPERATOR: frozenset({Scope.READ, Scope.OPERATE, Scope.METRICS}),
    Role.ADMIN: frozenset(Scope),
}
"""The only place where a role becomes scopes. A role is narrower than another if its scopes are among the other's."""

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signed by a private key and verified by a public one: none with a shared secret, and never `none`."""

_Limit = TypeVar("_Limit", int, float)

_MOST_BYTES = 1024 * 1024
_LONGEST_TEXT = 4096
_LONGEST_SECONDS = 30 * 86400

Pattern = Annotated[StrictStr, StringConstraints(min_length=1, max_length=1000)]
"""The exact text, or one with `*` for any characters but `:`."""
Wanted = StrictBool | StrictInt | Pattern | Annotated[list[Pattern], Field(min_length=1)]
"""Of a claim: one value, or any of a list. A claim that is a list itself needs one such item."""


def url_of_provider(url: str) -> str:
    """The same. Raises ValueError for one that is neither https nor http on this machine."""
    if not url.isprintable():  # half a character of two can be sent to nobody
        raise ValueError("it must be a URL of printable characters")
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
        raise ValueError("it must be a URL with a host and without user, query and fragment")
    if parts.scheme != "https" and not (parts.scheme == "http" and on_loopback(url)):
        raise ValueError("it must begin with https://; http:// is for this machine alone")
    return url


def on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ProviderUrl = Annotated[StrictStr, AfterValidator(url_of_provider)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ProviderRules(_Part):
    """An issuer that is believed. `audiences`: of the tokens that jobs bring. `client_id`: of people who sign in on the
    page, with `client_secret_file` if the provider gave a secret; `device_client_id`: of those who sign in by a
    command, if that needs another one. An ID token for these opens one Holdfast token only."""

    name: Name
    issuer: ProviderUrl
    audiences: list[Pattern] = []
    client_id: Pattern | None = None
    client_secret_file: Path | None = None
    device_client_id: Pattern | None = None
    title: Annotated[StrictStr, StringConstraints(min_length=1, max_length=60)] | None = None
    scopes: list[Annotated[StrictStr, StringConstraints(pattern=r"^[\x21\x23-\x5b\x5d-\x7e]{1,200}$")]] = [
        "openid",
        "email",
        "profile",
    ]
    algorithms: list[StrictStr] = list(ALGORITHMS)
    clock_skew_seconds: int = Field(default=60, ge=0, le=300)
    groups_claim: Pattern = "groups"
    ca_file: Path | None = None
    jwks_url: ProviderUrl | None = None
    bearer_token_file: Path | None = None

    @property
    def clients(self) -> tuple[str, ...]:
        """Whose ID tokens are those of people."""
        return tuple(each for each in (self.client_id, self.device_client_id) if each is not None)

    @property
    def all_audiences(self) -> tuple[str, ...]:
        return (*self.audiences, *self.clients)

    @property
    def shown(self) -> str:
        """For people."""
        return self.title or self.name

    @field_validator("ca_file", "bearer_token_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("it must be an absolute path")
        return path

    @field_validator("algorithms")
    @classmethod
    def _asymmetric(cls, algorithms: list[str]) -> list[str]:
        if not algorithms or (unknown := sorted(set(algorithms) - set(ALGORITHMS))):
            named = f"not {', '.join(unknown)}" if algorithms else "none is named"
            raise ValueError(f"these can be allowed: {', '.join(ALGORITHMS)}; {named}")
        return algorithms

    @model_validator(mode="after")
    def _for_us(self) -> Self:
        if self.client_id is None and (self.client_secret_file is not None or self.device_client_id is not None):
            raise ValueError("`client_secret_file` and `device_client_id` go with a `client_id`")
        if self.client_id is not None and "openid" not in self.scopes:
            raise ValueError("`scopes` must have `openid`: without it there is no ID token")
        if not self.all_audiences:
            raise ValueError("name `audiences` (of jobs), `client_id` (of people) or both: a token for others is none")
        return self


class Rule(_Part):
    """Who has all these claims and one of these groups, has this role."""

    name: Annotated[StrictStr, StringConstraints(min_length=1, max_length=100)]
    provider: Name
    claims: dict[StrictStr, Wanted] = {}
    groups: list[Pattern] = []
    everyone: StrictBool = False
    role: Role
    projects: list[Name] = []
    every_project: StrictBool = False
    longest_seconds: int = Field(default=3600, ge=60, le=_LONGEST_SECONDS)
    once: StrictBool = False
    requests_per_second: TokenRate | None = None
    concurrent_requests: TokenCalls | None = None

    @model_validator(mode="after")
    def _says_whom_and_where(self) -> Self:
        if self.everyone == bool(self.claims or self.groups):
            raise ValueError(
                "say whom it is for: `claims`, `groups` or both. For all that the provider vouches for, and for them "
                "alone, say `everyone: true`"
            )
        for pattern in (*self.groups, *(each for wanted in self.claims.values() for each in _texts(wanted))):
            if not pattern.strip("*:/ "):
                raise ValueError(f"{pattern!r} fits everything; say `everyone: true` if that is meant")
        if self.every_project == bool(self.projects):
            raise ValueError("say where: either `projects` or `every_project: true`")
        return self

    def fits(self, claims: Mapping[str, Any], groups: Collection[str]) -> bool:
        """Of a token that the rule's own provider has issued."""
        if self.groups and not any(_fits(pattern, group) for pattern in self.groups for group in groups):
            return False
        return all(name in claims and _is_wanted(wanted, claims[name]) for name, wanted in self.claims.items())


class IdentityRules(_Part):
    """The whole file."""

    providers: list[ProviderRules] = Field(min_length=1)
    rules: list[Rule] = []

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for what, named in (
            ("providers have the name", [provider.name for provider in self.providers]),
            ("providers have the issuer", [provider.issuer for provider in self.providers]),
            ("rules have the name", [rule.name for rule in self.rules]),
        ):
            for name in named:
                if named.count(name) > 1:
                    raise ValueError(f"two {what} {name}")
        known = {provider.name for provider in self.providers}
        for rule in self.rules:
            if rule.provider not in known:
                raise ValueError(f"the rule {rule.name!r} is for the provider {rule.provider}, which is not listed")
        return self

    def provider_of_issuer(self, issuer: str) -> ProviderRules | None:
        return next((provider for provider in self.providers if provider.issuer == issuer), None)

    def provider(self, name: str) -> ProviderRules | None:
        return next((provider for provider in self.providers if provider.name == name), None)


class IdentityFileError(ValueError):
    """The message names the place in the file, and what to do."""


def read_rules(path: Path) -> IdentityRules:
    """Raises IdentityFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise IdentityFileError(f"{path} cannot be read ({error.strerror}).") from None
    if len(content) > _MOST_BYTES:
        raise IdentityFileError(f"{path} has more than {_MOST_BYTES} bytes.")
    return parse_rules(content)


def parse_rules(content: bytes) -> IdentityRules:
    """From YAML, of which JSON is a part. Raises IdentityFileError."""
    try:
        document = yaml.load(content, Loader=_StrictLoader)  # noqa: S506  (a SafeLoader that is stricter)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise IdentityFileError(f"{where}{getattr(error, 'problem', None) or 'this is no YAML'}.") from None
    try:
        return IdentityRules.model_validate(document)
    except ValidationError as error:
        raise IdentityFileError(_first_of(error, document)) from None


class _StrictLoader(yaml.SafeLoader):
    """The second of two equal keys would win without a word, an alias can make a small file large, a tag can name a
    type that its text has not, and a number in base 60 takes time by the square of its length."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        refused = ""
        if isinstance(event, yaml.AliasEvent):
            refused = "aliases are not taken; write it out"
        elif event.tag is not None:
            refused = "tags are not taken; leave it out"
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST_TEXT:
            refused = f"a text has at most {_LONGEST_TEXT} characters"
        if refused:
            raise yaml.MarkedYAMLError(problem=refused, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                said = "a key must be a text" if not isinstance(key, str) else f"the key {key!r} is there twice"
                raise yaml.MarkedYAMLError(problem=said, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _first_of(error: ValidationError, document: object) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where, at = "", document
    for part in first["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part in ("bool", "int", "str", "list[constrained-str]") and not (isinstance(at, Mapping) and part in at):
            continue  # pydantic's word for the member of a union
        else:
            where += f".{part}" if where else str(part)
        try:
            at = at[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            at = None
    said = first["msg"].removeprefix("Value error, ").removesuffix(".")
    if first["type"] == "extra_forbidden":
        said = "there is no such key"
    return f"{where or 'the file'}: {said}."


def _texts(wanted: Wanted) -> list[str]:
    return wanted if isinstance(wanted, list) else [wanted] if isinstance(wanted, str) else []


def _is_wanted(wanted: Wanted, value: object) -> bool:
    if isinstance(value, list):
        return any(_is_wanted(wanted, item) for item in value if not isinstance(item, list))
    if isinstance(wanted, bool | int):
        return type(value) is type(wanted) and value == wanted
    return isinstance(value, str) and any(_fits(pattern, value) for pattern in _texts(wanted))


def _fits(pattern: str, text: str) -> bool:
    return _expression(pattern).fullmatch(text) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """`*` ends at a colon: the parts of a subject are between colons, and some of them its holder may choose."""
    return re.compile("[^:]*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def groups_of(provider: ProviderRules, claims: Mapping[str, Any]) -> frozenset[str]:
    said = claims.get(provider.groups_claim)
    several = said if isinstance(said, list) else [said]
    return frozenset(each for each in several if isinstance(each, str))


@dataclass(frozen=True)
class Grant:
    """What one rule gives. `project` None: every project. A limit of None: that of the settings."""

    rule: str
    role: Role
    project: str | None
    longest_seconds: int
    once: bool
    requests_per_second: float | None = None
    concurrent_requests: int | None = None

    def covers(self, project: str) -> bool:
        return self.project is None or self.project == project


def grants_of(rules: IdentityRules, provider: ProviderRules, claims: Mapping[str, Any]) -> tuple[Grant, ...]:
    """All that the file gives to who has these claims, in its order."""
    groups = groups_of(provider, claims)
    return tuple(
        Grant(
            rule.name,
            rule.role,
            project,
            rule.longest_seconds,
            rule.once,
            requests_per_second=rule.requests_per_second,
            concurrent_requests=rule.concurrent_requests,
        )
        for rule in rules.rules
        if rule.provider == provider.name and rule.fits(claims, groups)
        for project in (rule.projects or (None,))
    )


@dataclass(frozen=True)
class Decision:
    """What a token is made with. `project` None: every project. `roles`: those whose scopes it has, by the rules that
    gave them. `once`: the identity's token must not be taken again. A limit of None: that of the settings."""

    project: str | None
    scopes: frozenset[Scope]
    roles: tuple[Role, ...]
    rules: tuple[str, ...]
    longest_seconds: int
    once: bool
    requests_per_second: float | None = None
    concurrent_requests: int | None = None


def decide(grants: Sequence[Grant], *, project: str | None = None, role: Role | None = None) -> Decision:
    """The scopes of all grants for the project together, for as long as the shortest of them allows and within the
    least of their limits; or those of `role` alone, as one grant of it allows. Without a project: every project if one
    grant is for that, else the one that all are for. Raises `identity_not_granted` and `identity_project_needed`."""
    if not grants:
        raise ProblemError(
            ProblemCode.IDENTITY_NOT_GRANTED,
            "The identity is known, and no rule gives it anything. Ask an administrator for a rule in the identity "
            "file (HOLDFAST_IDENTITY_FILE).",
        )
    where = project
    if project is not None:
        chosen = [grant for grant in grants if grant.covers(project)]
    elif not (chosen := [grant for grant in grants if grant.project is None]):
        named = sorted({grant.project for grant in grants if grant.project is not None})
        if len(named) > 1:
            raise ProblemError(
                ProblemCode.IDENTITY_PROJECT_NEEDED,
                "The identity may call for several projects, and a token is for one of them. Name it: set "
                f"HOLDFAST_IDENTITY_PROJECT, or `project` in the call, to one of: {_some(named)}.",
                projects=named,
            )
        where, chosen = named[0], list(grants)
    if role is not None:
        wanted = SCOPES_OF_ROLE[role]
        enough = [grant for grant in chosen if wanted <= SCOPES_OF_ROLE[grant.role]]
        chosen = sorted(enough, key=lambda grant: (not grant.once, grant.longest_seconds))[-1:]  # one of them is enough
    if not chosen:
        for_what = f"the role {role}" if role is not None else "any role"
        given = sorted({f"{grant.role} on {grant.project or 'every project'}" for grant in grants})
        raise ProblemError(
            ProblemCode.IDENTITY_NOT_GRANTED,
            f"No rule gives this identity {for_what}{_on(project)}. It has: {_some(given)}. Ask for one of these, or "
            "ask an administrator for a rule in the identity file.",
        )
    roles = (role,) if role is not None else tuple(sorted({grant.role for grant in chosen}))
    return Decision(
        project=where,
        scopes=frozenset().union(*(SCOPES_OF_ROLE[each] for each in roles)),
        roles=roles,
        rules=tuple(sorted({grant.rule for grant in chosen})),
        longest_seconds=min(grant.longest_seconds for grant in chosen),
        once=any(grant.once for grant in chosen),
        requests_per_second=_least(grant.requests_per_second for grant in chosen),
        concurrent_requests=_least(grant.concurrent_requests for grant in chosen),
    )


def _least(limits: Iterable[_Limit | None]) -> _Limit | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _on(project: str | None) -> str:
    return "" if project is None else f" on the project {project}"


_MOST_NAMED = 20


def _some(texts: Iterable[str]) -> str:
    every = list(texts)
    return ", ".join(every[:_MOST_NAMED]) + (" …" if len(every) > _MOST_NAMED else "")
