"""The way back for readers: what a checkpoint consists of, tickets to read it, and what becomes of a reader's report.

read_checkpoint.py  manifest and chunk lists; the best copy of each chunk, with a ticket, under a lease
report_chunk.py     a reader says that a chunk is wrong: the service reads it itself before it flags anything
"""
