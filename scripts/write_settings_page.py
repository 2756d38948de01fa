"""Write docs/settings.md from the settings classes, so that the page cannot say anything else than the code.

Run it with `make docs`; tests/architecture/test_settings_page.py fails while the page is not current.
"""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings

from holdfast.settings import TrainerSettings
from holdfast_client.settings import ClientSettings
from holdfast_service.settings import ServiceSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
PREFIX = "HOLDFAST_"

_HEAD = """# Settings

Every setting is an environment variable. A wrong value stops the start with a sentence that names the setting.
This page is made by `make docs` from the classes that it names; edit the descriptions there.
"""
_SECTIONS: tuple[tuple[str, str, type[BaseSettings]], ...] = (
    ("Service", "What `holdfast serve` reads (`holdfast_service.settings`).", ServiceSettings),
    ("Client", "What every client reads: the CLI, the SDK, `holdfast_client.Client`.", ClientSettings),
    ("Training", "What the SDK reads in a training job, beside the client's (`holdfast.settings`).", TrainerSettings),
)
_TAIL = """## Credentials

The `s3` store finds its credentials as every AWS tool does: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` in the
environment of the service, a profile, or the instance's role. The `gcs` store finds its own as every Google tool does:
the key file that `GOOGLE_APPLICATION_CREDENTIALS` names, or the machine's service account
([set up](operating/set-up.md#a-bucket-at-google)). The `azure` store takes the account's key from
`AZURE_STORAGE_KEY`, or a managed identity ([set up](operating/set-up.md#a-container-at-azure)). They never stand in a
setting, in the catalog or in a ticket. Trainers need none.

Rank and world size are those of torch.distributed; `LOCAL_RANK` is read as torchrun sets it.
"""


def page() -> str:
    """The whole page. Raises ValueError for a setting without a description."""
    parts = [_HEAD]
    for title, what, settings in _SECTIONS:
        rows = [_row(settings, name) for name in settings.model_fields]
        parts.append(
            "\n".join(
                [f"## {title}", "", what, "", "| setting | default | what it is |", "| --- | --- | --- |", *rows, ""]
            )
        )
    return "\n".join([*parts, _TAIL])


def _row(settings: type[BaseSettings], name: str) -> str:
    field = settings.model_fields[name]
    if not field.description:
        raise ValueError(f"{settings.__name__}.{name} has no description; write Field(description=…)")
    description = field.description.replace("|", "\\|")
    return f"| `{PREFIX}{name.upper()}` | {_default(field.default)} | {description} |"


def _default(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
