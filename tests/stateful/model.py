"""What the commit protocol promises, in a few lines: the model that the service is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

RANKS = 2


@dataclass
class ShardModel:
    """`ready`: a chunk that is certainly there, by the service's word or because it was sent. `sealed`: its content."""

    negotiated: dict[bytes, dict[str, object] | None] = field(default_factory=dict)
    ready: set[bytes] = field(default_factory=set)
    unsure: set[bytes] = field(default_factory=set)
    sealed: tuple[bytes, ...] | None = None


@dataclass
class SaveModel:
    id: str
    attempt: int
    step: int
    state: str = "uploading"
    shards: list[ShardModel] = field(default_factory=lambda: [ShardModel() for _ in range(RANKS)])

    @property
    def whole(self) -> bool:
        return all(shard.sealed is not None for shard in self.shards)


@dataclass
class AttemptModel:
    """`base`: the line up to where it resumed; it becomes the run's line with the first commit."""

    number: int
    base: list[SaveModel]
    cut: bool = False


@dataclass
class RunModel:
    attempts: list[AttemptModel] = field(default_factory=list)
    saves: list[SaveModel] = field(default_factory=list)
    line: list[SaveModel] = field(default_factory=list)

    @property
    def attempt(self) -> AttemptModel:
        return self.attempts[-1]

    @property
    def latest(self) -> SaveModel | None:
        return max(self.line, key=lambda save: (save.step, save.attempt), default=None)

    def live(self, step: int) -> SaveModel | None:
        """This attempt's checkpoint of the step, unless it was aborted."""
        for save in self.saves:
            if (save.attempt, save.step) == (self.attempt.number, step) and save.state != "aborted":
                return save
        return None

    def commit(self, save: SaveModel) -> None:
        save.state = "committed"
        if not self.attempt.cut:
            self.line = list(self.attempt.base)
            self.attempt.cut = True
        self.line.append(save)

    def open(self, *, resume: bool) -> None:
        for save in self.saves:
            if save.state == "uploading":
                save.state = "aborted"
        restored = self.latest
        base = [save for save in self.line if restored is not None and save.step <= restored.step] if resume else []
        self.attempts.append(AttemptModel(len(self.attempts) + 1, base))
