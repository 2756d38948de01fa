"""docs/settings.md is what scripts/write_settings_page.py makes of the settings classes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.settings import TrainerSettings
from holdfast_client.settings import ClientSettings
from holdfast_service.settings import ServiceSettings, refuse_unknown_settings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "write_settings_page.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_settings_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `make docs`"


@pytest.mark.parametrize("settings", [ServiceSettings, ClientSettings, TrainerSettings])
def test_every_setting_is_on_the_page(script: ModuleType, settings: type) -> None:
    text = script.page()
    for name in settings.model_fields:
        assert f"| `HOLDFAST_{name.upper()}` |" in text


def test_a_trainer_and_the_service_can_share_one_environment() -> None:
    """The service stops at a setting that nobody knows; those of the others on its machine are known."""
    trainers = {
        f"HOLDFAST_{name.upper()}": "" for kind in (ClientSettings, TrainerSettings) for name in kind.model_fields
    }
    refuse_unknown_settings(trainers)
