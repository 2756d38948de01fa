"""The installed version, as the package's metadata says."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("holdfast")
