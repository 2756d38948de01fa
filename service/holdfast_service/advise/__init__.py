"""How often a run should save, and why: `show.py` reads, `explain.py` puts it into words. The number itself is the
catalog's (catalog/save_advice.py), for attempts are told it too."""
