"""Reading the audit events. Each is written by whoever makes the change, in its transaction (`audit/record.py`)."""
