"""The data plane: a rank's chunks go straight to the store and come straight from it, each proven by its SHA-256.

Up: `uploader` negotiates, has chunks sent and reports. Down: `fetcher` asks for tickets. `transfer` moves one chunk,
with HTTP or without, and proves that the latter is allowed.
"""
