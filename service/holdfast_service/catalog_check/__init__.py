"""Compares the catalog with its stores, both ways, and says what to do about each difference."""
