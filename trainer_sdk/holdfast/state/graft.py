"""Give plain values back: into the user's own containers where they are of the same type. Below load.py.

Whoever else holds a reference to a list or dict of the state sees the restored values too.
"""

from collections import Counter, OrderedDict, defaultdict
from typing import Any

_DICTS = (dict, OrderedDict, Counter, defaultdict)


def graft(live: Any, restored: Any) -> Any:
    """`live`, made equal to `restored` in place, if both are the same kind of dict or list; else `restored`."""
    if type(live) is not type(restored):
        return restored
    if type(live) in _DICTS:
        values = {key: graft(live[key], value) if key in live else value for key, value in restored.items()}
        live.clear()
        live.update(values)
        if isinstance(live, defaultdict):
            live.default_factory = restored.default_factory
        return live
    if type(live) is list:
        shared = [graft(old, new) for old, new in zip(live, restored, strict=False)]
        live[:] = shared + restored[len(shared) :]
        return live
    return restored
