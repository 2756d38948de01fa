"""What a rank and the agent of its node say to each other. A frame is one of these models as JSON, maybe with bytes.

rank   Hello            Share + memory   HandOver + documents   Run            Stop  Release  Settle   Forget  Bye
agent  Welcome/Refused  Taken/Refused    Taken/Refused          Begun Verified… Ended         Settled

rank   Borrow                              Reclaim   MakeRoom       Here      Meet   Proven            MaySeal
agent  Lent + memory and documents… Taken            Taken/Refused  PeerHere                 Sealing

An operator's command asks Report, without a Hello, and is answered Status. What agents of several hosts say to each
other over HTTP is at the end (peer_server.py).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr, TypeAdapter, model_validator

from holdfast_client import errors
from holdfast_client.chunks.peer_http import PeerAddress
from holdfast_client.errors import HoldfastError, rebuild_error
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import Digest, Fence, LaunchId, Name, RunName
from holdfast_protocol.checkpoints import BeginCheckpoint, CheckpointView, IndexOrdinals, ShardSummary, Step
from holdfast_protocol.states import CheckpointKind

VERSION = 5
"""Of these frames. Both sides say theirs; with unlike ones the rank saves without the agent."""


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Caller(_Frame):
    """How a rank calls the service: its settings, and its token as text. They are in memory alone, on both sides."""

    settings: dict[str, JsonValue]
    token: str | None

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Raises ConfigurationError if the token's file cannot be read."""
        token = None if settings.has_identity else settings.find_token()
        return cls(
            settings=settings.model_dump(mode="json", exclude={"token"}),
            token=None if token is None else token.get_secret_value(),
        )

    def client_settings(self) -> ClientSettings:
        """The rank's, whatever the agent's own environment says. Raises ConfigurationError."""
        told = {name: value for name, value in self.settings.items() if name in ClientSettings.model_fields}
        return ClientSettings(**told | {"token": None if self.token is None else SecretStr(self.token)})


class Hello(_Frame):
    type: Literal["hello"] = "hello"
    version: int
    holdfast: str
    project: Name
    run: Name
    rank: int = Field(ge=0)
    host_ranks: int = Field(ge=1, description="Ranks of the job on this node: they begin and seal in one call.")
    transfers: int = Field(ge=1)
    caller: Caller


class Welcome(_Frame):
    type: Literal["welcome"] = "welcome"
    version: int
    holdfast: str
    keeps: int = Field(ge=0, description="States of a run that stay in memory while the next one is staged.")


class Refused(_Frame):
    """The answer to Hello, Share, HandOver or MakeRoom: the rank saves by itself. `reason` says why, and what to do."""

    type: Literal["refused"] = "refused"
    reason: str


class Taken(_Frame):
    """The answer to Share and HandOver. From here on a save that is proven is committed even if its rank is killed. The
    end of the answers to Borrow. And the answer to MakeRoom: there is more room now."""

    type: Literal["taken"] = "taken"


class Share(_Frame):
    """With one descriptor: sealed memory that later HandOvers name."""

    type: Literal["share"] = "share"
    memory: int
    bytes: int = Field(gt=0)
    spare: bool = Field(default=False, description="It is for the next save, so that a kept state stays where it is.")


class Forget(_Frame):
    """The rank does not use this memory any more. A state in it stays kept."""

    type: Literal["forget"] = "forget"
    memory: int


class Reclaim(_Frame):
    """The rank stages the next save into this memory: what is kept in it is kept no longer."""

    type: Literal["reclaim"] = "reclaim"
    memory: int


class MakeRoom(_Frame):
    """The container of this rank has no room for its staging memory, and may pay for a state that an ended launch has
    left, or, if it is the agent's too, for a copy: one part of such a state goes. Refused: there is none."""

    type: Literal["make_room"] = "make_room"
    spare: bool = Field(default=False, description="It is for the next save: only a copy goes for it.")


class StagedChunk(_Frame):
    """A range of the memory, which does not change until the save is released."""

    start: int = Field(ge=0)
    bytes: int = Field(ge=0)
    item_bytes: int = Field(default=1, ge=1)
    digest: Digest | None = None


class HandOver(_Frame):
    """One rank's part of one save, as its attempt would write it. The bytes of the documents follow the frame."""

    type: Literal["hand_over"] = "hand_over"
    project: Name
    run: Name
    epoch: int = Field(ge=1)
    attempt: int = Field(ge=1)
    launch_id: LaunchId
    number: int = Field(ge=1, description="Counts the saves of the attempt.")
    step: Step
    kind: CheckpointKind
    world_size: int = Field(ge=1)
    rank: int = Field(ge=0)
    memory: int
    chunks: list[StagedChunk] = Field(description="By ordinal; the documents come after them.")
    documents: list[Annotated[int, Field(ge=0)]] = Field(description="Bytes of each.")
    index: IndexOrdinals
    summary: ShardSummary
    retry_seconds: float = Field(ge=0, description="How long the agent retries each of its calls if the rank is dead.")
    is_proven: bool = Field(default=True, description="Else it is not sealed before Proven.")

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)

    @property
    def begin(self) -> BeginCheckpoint:
        fence = Fence(epoch=self.epoch, attempt=self.attempt, launch_id=self.launch_id)
        return BeginCheckpoint(
            **fence.model_dump(),
            step=self.step,
            world_size=self.world_size,
            kind=self.kind,
            save_number=self.number,
        )


class Run(_Frame):
    """Begin, upload and seal it now: one try. Its answers end with Ended."""

    type: Literal["run"] = "run"
    number: int
    summary: ShardSummary
    retry_seconds: float = Field(ge=0)


class Proven(_Frame):
    """Nothing has written to what the save was copied from while training went on: it may be sealed."""

    type: Literal["proven"] = "proven"
    number: int


class MaySeal(_Frame):
    """Nothing has written to it so far: the seal that waits may go on. Until Proven each seal asks anew."""

    type: Literal["may_seal"] = "may_seal"
    number: int


class Stop(_Frame):
    """Cut the try off. Its Ended comes when nothing reads the memory any more."""

    type: Literal["stop"] = "stop"
    number: int


class Release(_Frame):
    """The save is over for its rank, and its memory belongs to the next one. Not while a try runs. With digests it is
    kept until Reclaim."""

    type: Literal["release"] = "release"
    number: int
    digests: list[Digest] = Field(default=[], description="Of its chunks and documents; none: the save has failed.")


class Settle(_Frame):
    """Asked by a new launch before it opens its attempt, which would fence what a dead one has left to the agent."""

    type: Literal["settle"] = "settle"


class Borrow(_Frame):
    """Asked by a restore: what is kept of the run?"""

    type: Literal["borrow"] = "borrow"


class Here(_Frame):
    """Asked by a new launch before it opens its attempt: where do other hosts reach this agent, and what has it?"""

    type: Literal["here"] = "here"


class Meet(_Frame):
    """The agents of the job's other hosts: the next host's first. The first ones get copies."""

    type: Literal["meet"] = "meet"
    host: int = Field(ge=0, description="The lowest rank on this host.")
    others: list[PeerAddress]


class Bye(_Frame):
    """The rank ends by itself, and has given up what is not over."""

    type: Literal["bye"] = "bye"
    is_finished: bool = Field(default=False, description="The job has done its work: no relaunch is to come.")


class Begun(_Frame):
    type: Literal["begun"] = "begun"
    number: int
    view: CheckpointView


class Verified(_Frame):
    type: Literal["verified"] = "verified"
    number: int
    bytes: int


class Sealing(_Frame):
    """All of it is sent, and it is not proven. The rank answers with MaySeal, or with Stop if the save is torn."""

    type: Literal["sealing"] = "sealing"
    number: int


class Failure(_Frame):
    """An exception of this library. Any other one is the agent's own trouble, and the rank does the work itself."""

    kind: str
    args: list[str]
    facts: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Self:
        known = type(error) if isinstance(error, HoldfastError) else HoldfastError
        facts = vars(error) if isinstance(error, HoldfastError) else {}
        plain = {name: value for name, value in facts.items() if _is_plain(value)}
        kind = known.__name__ if isinstance(error, HoldfastError) else ""
        return cls(kind=kind, args=[str(each) for each in error.args], facts=plain)

    def error(self) -> HoldfastError | None:
        """As it was raised in the agent; None if it is none of this library's."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
            return None
        return rebuild_error(kind, tuple(self.args), self.facts)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


class Ended(_Frame):
    """One try is over. `view`: sealed; else `failure`."""

    type: Literal["ended"] = "ended"
    number: int
    view: CheckpointView | None = None
    failure: Failure | None = None
    begin_failed: bool = False
    digests: list[Digest] = []
    sent_bytes: int = 0
    sent_chunk_bytes: int = 0


class Settled(_Frame):
    """`left`: steps that are still not sealed, because the agent was told to end."""

    type: Literal["settled"] = "settled"
    left: list[int] = []


class Lent(_Frame):
    """One rank's part of a kept state, with the descriptor of its memory. The bytes of the documents follow."""

    type: Literal["lent"] = "lent"
    chunks: list[StagedChunk] = Field(description="Ranges of the memory.")
    documents: list[StagedChunk] = Field(description="Ranges of the bytes that follow.")


class PeerHere(_Frame):
    """The answer to Here."""

    type: Literal["peer_here"] = "peer_here"
    address: PeerAddress | None = Field(description="None: it has no copies, and takes none.")
    ranks: list[int] = Field(description="Of whom it keeps a part of the run, its own or a copy.")


class Alive(_Frame):
    """Said while a rank waits for something: an agent that is stopped says nothing."""

    type: Literal["alive"] = "alive"


class Report(_Frame):
    """Asked for an operator."""

    type: Literal["report"] = "report"


class HeldPart(_Frame):
    """One rank's part of a save that the agent holds."""

    project: Name
    run: Name
    attempt: int
    step: Step
    rank: int
    bytes: int
    rank_lives: bool = Field(description="Else the agent finishes it by itself.")
    state: Literal["held", "uploading", "sealed"]
    tries: int
    last_error: str | None


class Counts(_Frame):
    """Since the agent was started."""

    taken: int = Field(default=0, description="Parts that ranks have handed over.")
    tries: int = 0
    failed_tries: int = 0
    finished: int = Field(default=0, description="Parts of dead ranks that were committed.")
    given_up: int = Field(default=0, description="Parts of dead ranks that were not.")
    last_error: str | None = None
    last_error_at: datetime | None = None


class KeptState(_Frame):
    """A state that stays in memory for a relaunch."""

    project: Name
    run: Name
    attempt: int
    step: Step
    parts: int
    host_ranks: int = Field(description="With so many parts it is whole on this node.")
    bytes: int
    copy_of: int | None = Field(default=None, description="A copy: the lowest rank on the host that it is of.")
    is_committed: bool = Field(default=True, description="Or safe elsewhere, as far as is known here.")


class Status(_Frame):
    type: Literal["status"] = "status"
    holdfast: str
    pid: int
    of_launch: bool = Field(description="It ends with the launch that has started it.")
    started_at: datetime
    memory_bytes: int = Field(description="What ranks share with the agent.")
    memory_limit_bytes: int
    ranks: int = Field(description="Connected, or dead with saves that are not finished.")
    held: list[HeldPart]
    kept: list[KeptState]
    counts: Counts


Asked = (
    Hello
    | Share
    | Forget
    | Reclaim
    | MakeRoom
    | HandOver
    | Run
    | Proven
    | MaySeal
    | Stop
    | Release
    | Settle
    | Borrow
    | Here
    | Meet
    | Bye
    | Report
)
Told = Welcome | Refused | Taken | Begun | Verified | Sealing | Ended | Settled | Lent | PeerHere | Alive | Status
ASKED: TypeAdapter[Asked] = TypeAdapter(Annotated[Asked, Field(discriminator="type")])
TOLD: TypeAdapter[Told] = TypeAdapter(Annotated[Told, Field(discriminator="type")])


class Offer(_Frame):
    """One rank's part of a state: the other agent may copy it from `source`, by digest, while it stays there."""

    source: PeerAddress
    host: int = Field(ge=0, description="The lowest rank on the host that it is of.")
    host_ranks: int = Field(ge=1)
    hand: HandOver
    digests: list[Digest] = Field(description="Of its chunks and documents.")
    is_safe: bool = Field(default=True, description="Committed, or on a disk. Else it is offered again when it is.")
    is_given_up: bool = Field(default=False, description="It will not be committed: a copy that was made is to go.")

    @model_validator(mode="after")
    def _one_digest_each(self) -> Self:
        if len(self.digests) != len(self.hand.chunks) + len(self.hand.documents):
            raise ValueError("a chunk or document has no digest")
        return self


class Find(_Frame):
    """Which of these chunks are kept of the run?"""

    project: Name
    run: Name
    digests: list[Digest]


class Found(_Frame):
    bytes: list[int | None] = Field(description="Of each; None: it is not there.")
