"""The metric curves of runs: what jobs measure at their steps, told with heartbeats, bounded for each run, and read
along the lineage (docs/adr/0065)."""
