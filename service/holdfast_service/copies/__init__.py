"""The copies of chunks in the stores.

predicates.py    which copies can be relied on, over one row and as conditions of a query
read_back.py     the service reads a copy's bytes itself
corruption.py    which checkpoints a bad copy concerns, and their flags
copy_chunk.py    from one copy to another store or storage class
cold.py          copies that must be thawed before they can be read
stored_bytes.py  what a project's copies take up
"""
