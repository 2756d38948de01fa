"""The data plane: a rank's chunks go straight to the store and come straight from it, each proven by its SHA-256.

Up: `uploader` negotiates, sends and reports. Down: `fetcher` asks for tickets, `download` reads one chunk.
`mounted_files` does both without HTTP, and proves that this is allowed.
"""
