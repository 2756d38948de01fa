"""The data plane: a rank's chunks go straight to the store and come straight from it, each proven by its SHA-256.

Up: `uploader` negotiates and reports, `upload` sends one chunk. Down: `fetcher` asks for tickets, `download` reads one
chunk. `mounted_files` is both ways without HTTP, and proves that this is allowed.
"""
