"""A catalog that has something on every screen of the page.

demo/gpt      live. Attempt 1 was killed at step 450; attempt 2 went back to step 200 (a rollback), saved 250 and 300,
              and a diverged checkpoint at 350. Step 400 is in the trash. It has a configuration, a policy, and curves:
              `loss` at every tenth step, with a NaN at 350 and a spike at 440 of the branch that was left, and `lr`.
              It was sampled in six hours, and between two of them it was not live.
demo/bert     failed. Steps 10 to 40; a person and the trash may have 10; 40 is corrupt: its bytes changed in the store.
demo/doctor   finished. Two little checkpoints with real tensors and real indexes.
"""

from __future__ import annotations

from sqlalchemy import insert, select

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.index_documents import Layout, Piece, SavedAs, Segment, ShardIndex, ShardLayout, TensorEntry
from holdfast_protocol.states import StoreRole
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.samples import ProjectSampleRow, RunSampleRow
from holdfast_service.samples.take import HOUR, last_hour
from tests.support.little_checkpoints import save_little_checkpoint
from tests.support.rank import Job, answer, digest_of
from tests.support.rot import attached, flip, key_of
from tests.support.service import RunningService

_LOST = b"the weights of bert at step 40"


class SeededCatalog:
    """Empty until `fill`. Then `job` is the live attempt of demo/gpt, and the other fields are checkpoints' ids."""

    job: Job
    restore_point: str
    diverged: str
    trashed: str
    corrupt: str
    deletable: str
    whole: str
    whole_before: str
    cut: str

    def fill(self, service: RunningService) -> None:
        http = service.http()
        answer(http.put("/v1/projects/demo", json={"quota_bytes": 10**9}, headers={"If-Match": "*"}))
        self._save_gpt(service)
        self._save_bert(service)
        with Client(ClientSettings(url=service.url, token=service.token())) as client:
            for _ in range(2):
                save_little_checkpoint(client, "demo")
        newest, before = answer(http.get("/v1/projects/demo/runs/doctor/checkpoints"))["items"]
        self.whole, self.whole_before = newest["id"], before["id"]
        hook = {"url": "https://hooks.example/holdfast", "events": ["checkpoint.committed"]}
        answer(http.post("/v1/projects/demo/webhooks", json=hook))
        answer(http.post("/v1/sweeps", json={"dry_run": True}))
        seed_samples(service)
        _seed_run_samples(service)

    def _save_gpt(self, service: RunningService) -> None:
        http = service.http()
        killed = Job(http, "demo/gpt", config={"optimizer": {"lr": 0.001}}, environment={"torch": "2.7"}, host="node-1")
        kept = [killed.save(step, metrics={"loss": {"value": 100 / step}}) for step in (100, 200, 300, 400)]
        trains(killed, 450, loss=[[step, 100 / step] for step in range(10, 440, 10)] + [[440, 1e6]])
        killed.end("failed", detail="killed by signal 9", error_type="SIGKILL")
        self.job = Job(
            http, "demo/gpt", after=1, config={"optimizer": {"lr": 0.0005}}, environment={"torch": "2.8"}, host="node-2"
        )
        self.job.resumed_from(kept[1]["id"], rollback=True)
        self.job.save(250, metrics={"loss": {"value": 0.3}})
        self.restore_point = self.job.save(300, metrics={"loss": {"value": 0.25}})["id"]
        self.diverged = self.job.save(350, metrics={"loss": {"nonfinite": "nan"}}, finite=False)["id"]
        told = [[step, 60 / step] for step in range(210, 350, 10)] + [[350, "nan"], [360, 0.2]]
        trains(self.job, 360, loss=told, lr=[[210, 0.0005], [360, 0.0004]])
        self.trashed = kept[3]["id"]
        prune = {"checkpoint_ids": [self.trashed], "dry_run": False, "reason": "of a branch that was left"}
        answer(http.post("/v1/projects/demo/runs/gpt/retention/prune", json=prune))
        for level, kept_last in (("demo", 5), ("demo/runs/gpt", 3)):
            policy = {"document": {"keep_last": kept_last}}
            answer(http.put(f"/v1/projects/{level}/policies/retention", json=policy))
        objectives = {"document": {"rpo_seconds": 3600, "rto_seconds": 900}}
        answer(http.put("/v1/projects/demo/policies/objectives", json=objectives))

    def _save_bert(self, service: RunningService) -> None:
        http = service.http()
        job = Job(http, "demo/bert", host="node-3")
        self.deletable = job.save(10)["id"]
        for step in (20, 30):
            job.save(step)
        self.corrupt = job.save(40, content=_LOST)["id"]
        job.end("failed", detail="CUDA error: an illegal memory access", error_type="RuntimeError")
        flip(attached(service, StoreRole.PRIMARY).store, key_of(service, _LOST))
        seen = {"digest": digest_of(_LOST), "problem": "mismatch"}
        answer(http.post(f"/v1/checkpoints/{self.corrupt}/chunk-reports", json=seen))


def seed_samples(service: RunningService) -> None:
    """Of demo, for the last 40 hours; in three of them the service was down."""
    with service.context.database.transaction() as session:
        project_id = session.execute(select(Project.id).where(Project.name == "demo")).scalar_one()
        newest = last_hour(database_now(session))
        rows = [
            {
                "project_id": project_id,
                "hour": newest - at * HOUR,
                "taken_at": newest - (at - 1) * HOUR,
                "committed_checkpoints": 10 - at // 4,
                "logical_bytes": (100 - at) * 10**9,
                "productive_seconds": 3600.0 - at * 20,
                "wall_seconds": 3600.0,
                "restore_point_age_seconds": 600.0,
                "stored_bytes": (90 - at) * 10**9,
                "stores": {"primary": (90 - at) * 10**9},
                "currency": "USD",
                "per_month": (90 - at) * 0.02,
                "unpriced_bytes": 0,
                "live_runs": 1,
                "runs_without_restore_point": 0,
            }
            for at in range(40)
            if at not in (11, 12, 13)
        ]
        session.execute(insert(ProjectSampleRow), rows)


def _seed_run_samples(service: RunningService) -> None:
    with service.context.database.transaction() as session:
        run_id = session.execute(select(Run.id).where(Run.name == "gpt")).scalar_one()
        newest = last_hour(database_now(session))
        rows = [
            {
                "run_id": run_id,
                "hour": newest - at * HOUR,
                "taken_at": newest - (at - 1) * HOUR,
                "committed_checkpoints": 10 - at,
                "logical_bytes": (20 - at) * 10**9,
                "productive_seconds": 3000.0 - at * 100,
                "wall_seconds": 3600.0,
                "restore_point_age_seconds": 600.0 * (at + 1),
                "last_step": 360 - at * 20,
                "restore_point_step": 300 - at * 20,
                "attempt": 2,
                "attempt_productive_seconds": None,
            }
            for at in (0, 1, 2, 5, 6, 7)
        ]
        session.execute(insert(RunSampleRow), rows)


def trains(job: Job, step: int, **metrics: list[list[float | str]]) -> None:
    """A heartbeat of a job that gets on, and what it has measured: `[step, value]`."""
    job.heartbeat(
        step,
        first_step=1,
        steps_run=step,
        first_step_age_seconds=float(step),
        progress_age_seconds=0.0,
        steps_per_second=2.0,
        metrics=metrics,
    )


def save_cut_tensor(service: RunningService) -> str:
    """The id of a checkpoint of two ranks: each has half of the rows of model/weight, and rank 0 the whole of
    model/bias."""
    job = Job(service.http(), "demo/cut", world_size=2)
    half, bias = bytes(range(64)), bytes(16)
    pieces = [Piece("model/weight", (4 * rank, 0), (4, 4), (Segment(0, 0, 64),)) for rank in range(2)]
    tied = Piece("model/bias", (0,), (4,), (Segment(1, 0, 16),))
    layout = Layout(
        world_size=2,
        tensors={
            "model/weight": TensorEntry("model", "float32", (8, 4), replicated=False),
            "model/bias": TensorEntry("model", "float32", (4,), replicated=True),
        },
        shards=(ShardLayout((64, 16), (pieces[0], tied)), ShardLayout((64,), (pieces[1],))),
    )
    save = job.begin(1)
    saved_as = SavedAs(job.run, step=1, world_size=2)
    for rank, data in enumerate(([half, bias], [half[::-1]])):
        index = ShardIndex(saved_as, rank=rank, layout_digest=layout.digest).encode()
        chunks = [*data, *([layout.encode()] if rank == 0 else []), index]
        ordinals = {"shard": len(chunks) - 1} | ({"layout": len(chunks) - 2} if rank == 0 else {})
        save.write(rank, chunks, index=ordinals)
    return save.id
