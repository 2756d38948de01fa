"""`holdfast spool list | push | drop`: saves that lie on this machine's disk and are not known to be committed."""
