"""What a policy would cost a month, if the run goes on as it has.

Retention's rules and the tiers' wishes are asked themselves, and not told again here: so this stands above those verbs,
as `background.py` does, and none of them knows it.

rhythm.py          how the run saves: how often, how many bytes (reads the catalog)
standing.py        what is kept once the policies have long been at work (pure)
forecast_cost.py   the bytes and the prices put together
"""
