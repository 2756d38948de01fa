"""MLflow: an MLflow run that goes on with the run of Holdfast, and has its restore points by reference.

    MlflowRestorePoints("demo/gpt") -> log(checkpointer.step(…)) -> a metric, tags and a small JSON artifact

Written against mlflow-skinny 3.17.
"""

from __future__ import annotations

from mlflow import MlflowClient

from holdfast.integrations.restore_points import RestorePointLog, reference
from holdfast_protocol.checkpoints import CheckpointView

_RUN_TAG = "holdfast.run"


class MlflowRestorePoints(RestorePointLog):
    """Each restore point as the metric `restore_point` at its step, and the newest in the tags `holdfast.latest` and
    `holdfast.latest_id`. The artifact `restore_points/step-N.json` has its URL and digest.

        with MlflowRestorePoints("demo/gpt", experiment="gpt") as points:  # MLFLOW_TRACKING_URI says where
            with holdfast.Checkpointer("demo/gpt", config={"mlflow_run": points.run_id}) as checkpointer:
                ...
                points.log(checkpointer.step(step, state, metrics={"loss": loss}))

    run: `project/run`, as for the Checkpointer.
    experiment: of MLflow, made if it is not there.
    run_id: an MLflow run of your own. By default that of the launch before, found by its tag `holdfast.run`; at the
        first launch a new one. None on ranks other than 0, which tell MLflow nothing, and until MLflow has answered:
        the constructor waits for that for 10 s.
    """

    tool = "MLflow"

    def __init__(
        self,
        run: str,
        *,
        experiment: str = "holdfast",
        run_id: str | None = None,
        client: MlflowClient | None = None,
    ) -> None:
        self.run_id, self._experiment, self._client = run_id, experiment, client
        super().__init__(run)
        if not self.is_first:
            self.run_id = None

    def open(self) -> None:
        self._client = self._client or MlflowClient()
        run_id = self.run_id or self._run_of(self._client)
        self._client.set_tag(run_id, _RUN_TAG, self.run)
        self.run_id = run_id

    def tell(self, view: CheckpointView) -> None:
        client, told = self._client, reference(self.run, view)
        assert client is not None
        client.log_metric(self.run_id, "restore_point", view.step, step=view.step)
        client.log_dict(self.run_id, told, f"restore_points/step-{view.step}.json")
        client.set_tag(self.run_id, "holdfast.latest", f"{self.run}@{view.step}")
        client.set_tag(self.run_id, "holdfast.latest_id", view.id)

    def _run_of(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(self._experiment)
        runs = client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{self.run}'", max_results=1)
        made: str = (runs[0] if runs else client.create_run(experiment_id, tags={_RUN_TAG: self.run})).info.run_id
        return made
