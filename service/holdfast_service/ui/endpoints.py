"""Serves the web page below `/ui/` (rule page-from-here).

The files are the same for every reader and hold no data, so the routes are open. A path that names no file is a place
within the page, and the page itself finds it. The page loads nothing from another origin, and runs no script but these
files.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse, RedirectResponse

from holdfast_service.web.frame import DocumentedRoute

BUILT_INTO = Path(__file__).parent / "static"
"""What `scripts/prepare-web` writes, and the wheel has."""

router = APIRouter(route_class=DocumentedRoute, tags=["ui"])

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
"""No other file is served."""
_PACKED = frozenset({".html", ".js", ".css", ".json", ".webmanifest", ".txt", ".svg"})
_HASHED = "assets"
"""Vite puts a file's hash into its name in this folder, so what stands under a name never changes."""
_GUARDS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_NOT_BUILT = (
    "The web page is not built here. In a clone run scripts/prepare-web, which needs Node.js; the packages that are "
    "published have it. The REST interface and the command line work without it.\n"
)


@dataclass(frozen=True)
class _File:
    plain: bytes
    packed: bytes | None
    media_type: str
    etag: str


@functools.lru_cache(maxsize=512)
def _read(path: Path, _changed_ns: int) -> _File:
    plain = path.read_bytes()
    packed = gzip.compress(plain, mtime=0) if path.suffix in _PACKED else None
    digest = hashlib.sha256(plain).hexdigest()[:32]
    return _File(plain, packed if packed and len(packed) < len(plain) else None, _TYPES[path.suffix], f'W/"{digest}"')


def _find(folder: Path, name: str) -> Path | None:
    """The file below the folder; None if there is none that is served. No `..`, no link and no hidden name leads
    elsewhere."""
    parts = PurePosixPath(name).parts
    if not parts or any(part.startswith((".", "/")) or "\\" in part or "\0" in part for part in parts):
        return None
    path = folder.joinpath(*parts)
    if path.suffix not in _TYPES:
        return None
    try:
        return path if path.is_file() and path.resolve().is_relative_to(folder.resolve()) else None
    except OSError:  # before Python 3.14 `is_file` raises for a name that is longer than the filesystem's
        return None


def _names_a_file(path: str, request: Request) -> bool:
    """False for a place within the page: a run's name may have dots, and even end in `.js`."""
    parts = PurePosixPath(path)
    in_assets = parts.parts[:1] == (_HASHED,)
    return in_assets or (parts.suffix in _TYPES and "text/html" not in request.headers.get("accept", ""))


@router.get("/", include_in_schema=False)
@router.get("/ui", include_in_schema=False)
def enter() -> Response:
    return RedirectResponse("/ui/", 307)


@router.api_route("/ui/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
def show(path: str, request: Request) -> Response:
    folder: Path = request.app.state.page_folder
    found = _find(folder, path)
    if found is None and _names_a_file(path, request):
        return PlainTextResponse(f"The web page has no file {path[:100]!r}.\n", 404, _GUARDS)
    path_served = found or _find(folder, "index.html")
    if path_served is None:
        return PlainTextResponse(_NOT_BUILT, 503, _GUARDS)
    file = _read(path_served, path_served.stat().st_mtime_ns)
    forever = found is not None and PurePosixPath(path).parts[0] == _HASHED
    headers = _GUARDS | {
        "Cache-Control": "public, max-age=31536000, immutable" if forever else "no-cache",
        "ETag": file.etag,
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    content = file.plain
    if file.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = file.packed, "gzip"
    return Response(content, headers=headers, media_type=file.media_type)
