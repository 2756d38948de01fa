"""`holdfast verify-resume`: does this very script, killed and resumed, train as if it had never stopped?

On the command's side, without torch: command -> verification (straight, killed, resumed) -> launching, with an
embedded_service; then evidence (what differs first) -> diagnosis (the likely missing piece of state) -> report.
In the script, if HOLDFAST_VERIFY_DIR is set: checkpointer -> recorder -> fingerprints, surroundings, iterators ->
records.
"""
