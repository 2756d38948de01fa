"""Compares the catalog with its stores, both ways, and says whose a store is (protocol rule 5).

findings.py     the kinds of difference, each with what to do
copies.py       rows against objects: missing ones and wrong sizes are looked at again and marked
records.py      the catalog against the records beside the data: what is old or damaged is written anew
differences.py  what a record says against its row, field by field
check.py        all of it for one store; what is found decides whether the store may be adopted
operation.py    `catalog check` as an operation that a person starts
adopt.py        the stores as people see them, and their adoption
endpoints.py    the routes
"""
