"""Where the client finds its service and its token."""

from __future__ import annotations

import pytest

from holdfast_client import Client, ClientSettings
from holdfast_client.errors import ConfigurationError, Unauthenticated
from tests.support.scripted_http import in_turn, problem, scripted


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch, tmp_path):
    for name in ("URL", "TOKEN", "TIMEOUT_SECONDS", "RETRY_SECONDS", "DATA_DIR", "DIRECT_FILES"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_settings_it_is_the_embedded_service_and_the_token_that_it_made(tmp_path):
    settings = ClientSettings()
    assert settings.url == "http://127.0.0.1:8400"
    assert settings.find_token() is None
    (tmp_path / ".holdfast").mkdir()
    (tmp_path / ".holdfast" / "token").write_text("hold_a_b\n")
    assert settings.find_token().get_secret_value() == "hold_a_b", "found when it comes, without a new start"


def test_the_token_file_is_never_sent_to_another_machine(tmp_path):
    (tmp_path / "token").write_text("hold_a_b")
    for url in ("https://holdfast.example.com", "http://10.0.0.1:8400", "http://127.0.0.1.example.com"):
        assert ClientSettings(url=url, data_dir=tmp_path).find_token() is None
    for url in ("http://localhost:1", "http://[::1]:1", "http://127.9.9.9:1"):
        assert ClientSettings(url=url, data_dir=tmp_path).find_token() is not None


def test_the_environment_is_read_and_a_set_token_wins(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("hold_file_x")
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TOKEN", " hold_env_x\n")
    assert ClientSettings().find_token().get_secret_value() == "hold_env_x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOLDFAST_URL", "localhost:8400"),
        ("HOLDFAST_URL", "ftp://x"),
        ("HOLDFAST_URL", "http://user:pass@host"),
        ("HOLDFAST_TIMEOUT_SECONDS", "0"),
        ("HOLDFAST_RETRY_SECONDS", "soon"),
        ("HOLDFAST_DIRECT_FILES", "perhaps"),
        ("HOLDFAST_TOKEN", "two words"),
    ],
)
def test_a_wrong_setting_is_named_and_its_value_is_not(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        ClientSettings()
    assert name in str(caught.value)
    assert value not in str(caught.value) or name == "HOLDFAST_TIMEOUT_SECONDS"


def test_no_token_says_where_it_looked(tmp_path):
    with scripted(in_turn(problem("unauthenticated"))) as server:
        with (
            Client(ClientSettings(url=server.url, data_dir=tmp_path)) as client,
            pytest.raises(Unauthenticated) as caught,
        ):
            client.service.info()
    assert "authorization" not in server.seen[0].headers
    assert str(tmp_path / "token") in str(caught.value)
    assert "HOLDFAST_TOKEN" in str(caught.value)
