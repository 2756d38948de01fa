"""What background work is made of: `report.py` is what every controller shares, `processes.py` the processes."""
