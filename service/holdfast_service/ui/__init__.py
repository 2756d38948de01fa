"""The web page: static files that `scripts/prepare-web` builds into `static/`. They hold no data; `/v1` does."""
