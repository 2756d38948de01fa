"""The way back: which restore point, tickets to read its chunks, and what to make of a reader's report."""
