"""What each figure ought to be. Nothing fails on it: the table says what is met and what is missed."""

from __future__ import annotations

import operator

from benchmarks.rows import Row

_AT_MOST = ("<=", operator.le)
_AT_LEAST = (">=", operator.ge)

BARS = {
    "stall_vs_memcpy": (_AT_MOST, 1.5),
    "stall_vs_dcp": (_AT_MOST, 1.0),
    "overlap_stall_vs_memcpy": (_AT_MOST, 0.1),
    "s3_save_cpu_vs_parts": (_AT_MOST, 1.1),
    "s3_save_vs_bare_put": (_AT_LEAST, 0.95),
    "s3_save_vs_s3torchconnector": (_AT_LEAST, 1.0),
    "posix_save_vs_ceiling": (_AT_LEAST, 0.9),
    "s3_restore_vs_s3torchconnector": (_AT_LEAST, 1.3),
    "posix_restore_vs_ceiling": (_AT_LEAST, 0.9),
    "memory_restore_vs_s3_restore": (_AT_MOST, 0.25),
    "memory_restore_seconds": (_AT_MOST, 1.0),
    "peer_restore_vs_link": (_AT_LEAST, 0.8),
    "s3_restore_cpu_s_per_gb": (_AT_MOST, 1.2),
    "save_peak_extra_memory_ratio": (_AT_MOST, 1.1),
    "bounded_save_peak_extra_mib": (_AT_MOST, 256),
    "dedup_sent_vs_changed": (_AT_MOST, 1.05),
    "train_rate_during_save": (_AT_LEAST, 0.95),
    "train_rate_with_agent_vs_hashing": (_AT_LEAST, 0.97),
}


def bar_of(row: Row) -> str:
    """`<= 1.5`; empty for a row without a bar."""
    if row.name not in BARS:
        return ""
    (sign, _), bar = BARS[row.name]
    return f"{sign} {bar:g}"


def verdict(row: Row) -> str:
    """`met`, `missed`, or empty where there is no bar or no value."""
    if row.name not in BARS or row.value is None:
        return ""
    (_, holds), bar = BARS[row.name]
    return "met" if holds(row.value, bar) else "missed"
