"""The way back: choose the point, read documents, plan, fetch and verify, and all ranks agree."""
