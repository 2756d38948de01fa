"""Two ranks, and the network of one fails: both commit or both fail; both restore, or nothing is touched on any."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.chaos.network import network
from tests.chaos.network_rank import PASSING, RESTORE, SAVE, TOGETHER, rank_main
from tests.trainer.gloo import run_ranks


def test_both_ranks_see_the_same_whatever_one_ranks_network_does() -> None:
    # The store's URLs lead to the service, and each rank has its own way there.
    with network(None) as net:
        run = net.new_run()
        port = urlsplit(net.running.url).port
        first, second = run_ranks(rank_main, 2, port, net.token, run, timeout_seconds=480)
        steps = {view.step: view.state for view in net.checkpoints(run)}
    assert first == second
    saves = (len(SAVE) + 1) * len(PASSING)
    restores = len(RESTORE) * len(PASSING)
    assert first == [
        *(f"committed {step}" for step in range(saves)),
        *[f"restored {saves - 1}"] * restores,
        "StoreUnavailable",
        *(f"SaveFailed {saves}", f"committed {saves + 1}"),
        *(f"SaveFailed {saves + 2}", f"committed {saves + 3}"),
        f"restored {saves + 3}",
        *(f"committed {saves + 4 + number}" for number in range(len(TOGETHER) * len(PASSING))),
    ]
    assert steps[saves] == "aborted"
    assert steps[saves + 2] == "aborted"
