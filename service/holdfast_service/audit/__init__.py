"""Reading the audit events. The transaction of each change writes its own event (`audit/record.py`)."""
