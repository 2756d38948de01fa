"""What must stay secret although it is in the catalog: encrypted with keys that are not there."""
