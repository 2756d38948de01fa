"""The catalog's database: engine and sessions, tables, pages, and what knows that it went back."""
