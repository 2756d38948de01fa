"""What checkpoints take up and what that costs.

show_usage.py   the figures of projects and runs
prices.py       the price list: the defaults, or what an administrator has put
cost.py         bytes times prices (pure)
show_cost.py    what it costs now
"""
