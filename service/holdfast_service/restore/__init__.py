"""The way back for readers: tickets to read a checkpoint's chunks, and what becomes of a reader's report.

read_tickets.py  the best copy of each chunk, with a ticket, under a lease that keeps the checkpoint
report_chunk.py  a reader says that a chunk is wrong: the service reads it itself before it flags anything
"""
