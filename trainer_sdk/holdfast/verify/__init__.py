"""`holdfast verify-resume`: does this very script, killed and resumed, train as if nothing had happened?

On the command's side, without torch: command -> verification (straight, killed, resumed) -> launching, with an
embedded_service; then evidence (what differs first) -> diagnosis (which piece of state is likely missing) -> report.
In the script, where HOLDFAST_VERIFY_DIR is set: checkpointer -> recorder -> fingerprints, surroundings, iterators ->
records.
"""
