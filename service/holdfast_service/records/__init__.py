"""What lies beside the data, so that a catalog can be rebuilt from the bucket alone (rule record-outbox).

documents.py   the names and the shape of the documents; content.py: what they say of a row
outbox.py      which records are due; writing.py: writes one, under a lease; controller.py: a pass over what is due
scanning.py    reads them back; whether a store has newer ones than the catalog
history.py     what processes remember of acknowledged changes, against a database that went back
"""
