"""Writes web/src/api/schema.d.ts: the types of the REST API for the web page, made of the service's own OpenAPI
document by openapi-typescript. `python -m scripts.web_schema` after a change of a route or of a model.

The first line of the file has the digest of the document, so a test sees drift without Node."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast_service.app import openapi_document

_ROOT = Path(__file__).resolve().parents[1]
_WEB = _ROOT / "web"
SCHEMA = _WEB / "src" / "api" / "schema.d.ts"


def document() -> str:
    """The OpenAPI document, the same text for the same API."""
    return json.dumps(openapi_document(), sort_keys=True, ensure_ascii=False)


def first_line(text: str) -> str:
    """What the schema of this document begins with."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"// By scripts/web_schema.py, of the OpenAPI document with SHA-256 {digest}.\n"


def main() -> int:
    text = document()
    generator = _WEB / "node_modules" / ".bin" / "openapi-typescript"
    if not generator.exists():
        print("The page's packages are not installed: scripts/prepare-web installs them.", file=sys.stderr)
        return 69
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "openapi.json"), Path(folder, "schema.d.ts")
        source.write_text(text, encoding="utf-8")
        subprocess.run([generator, source, "--output", made], check=True)
        SCHEMA.write_text(first_line(text) + made.read_text(encoding="utf-8"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
