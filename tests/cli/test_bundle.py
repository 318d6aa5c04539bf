"""`pagoda doctor --bundle`: nothing secret is in it, wherever it was."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.config import PARTS, EngineConfig
from pagoda.base.config_options import option_names
from pagoda.base.errors import ConfigError
from pagoda.base.redact import HIDDEN, Redactor, settings_without_secrets
from pagoda.base.setting import DescribedSetting
from pagoda.cli.bundle import write_bundle

SECRET = "Zq8xPagodaSecret7"


def members(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as opened:
        return {one.name: opened.extractfile(one).read().decode() for one in opened}  # type: ignore[union-attr]


def with_secret(item: DescribedSetting) -> Any:
    """Return a value of a setting with a secret in it, in the form that it can have there; None if it has none."""
    if item.setting.is_secret:
        return (SECRET,) if item.is_list else SECRET if item.type is str else None
    if item.is_mapping:
        return {"deep": [{"api_token": SECRET}], "url": f"https://me:{SECRET}@host/"}
    if item.setting.words or item.is_group:
        return None
    if item.is_list:
        return (f"https://me:{SECRET}@host/x",)
    return f"https://me:{SECRET}@host/x" if item.type is str else None


def test_no_setting_shows_a_secret_that_it_holds() -> None:
    options: dict[str, Any] = {}
    for kind in PARTS.values():
        for name, (item, group) in option_names(kind).items():
            is_only_name = group is None or "." in name
            if is_only_name and (value := with_secret(item)) is not None:
                options[name] = value
    assert {"api_keys", "admin_api_key", "model"} <= options.keys()
    assert len(options) > 20
    shown = json.dumps(settings_without_secrets(EngineConfig.from_options(**options)))
    assert SECRET not in shown
    assert shown.count(HIDDEN) >= len(options)
    assert (
        settings_without_secrets(EngineConfig.from_options(prefix_hash_seed=7))["debug"]["prefix_hash_seed"] == HIDDEN
    )


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"'authorization': 'Basic {SECRET}'",
        f'{{"Authorization": "Token {SECRET}"}}',
        f"x-api-key: {SECRET}",
        f"Cookie: session={SECRET}; other={SECRET}",
        f"bearer {SECRET}",
        f"HF_TOKEN={SECRET}",
        f"hf_{SECRET}",
        f"token sk-proj-{SECRET} was refused",
        f"pagoda serve x --api-key {SECRET} --port 1",
        f"--admin-api-key={SECRET}",
        f"--hf-token '{SECRET}'",
        f'api_keys: ["{SECRET}", "{SECRET}2"]',
        f"password: {SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"client_secret=12-{SECRET}",
        f"https://{SECRET}@host/path",
        f"postgres://me:{SECRET}@host",
        f"OTEL_EXPORTER_OTLP_HEADERS=x-key={SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"eyJhbGciOiJI.{SECRET}.{SECRET}",
    ],
)
def test_forms_of_secrets_are_known(text: str) -> None:
    assert SECRET not in Redactor().text(f"2026-11-27 INFO before {text}\nafter\n")


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=2048 and token: 17",
        "the token limit of 4096 tokens, tokenizer=/models/x, key=3",
        '{"prompt": [1, 2, 3], "num_tokens": 12, "token_ids": [1, 2]}',
        "a basic question; the bearer of news",
        "https://host/path?x=1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


def test_a_bundle_has_settings_environment_and_logs_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, settings, log = tmp_path / "keys", tmp_path / "serve.yaml", tmp_path / "server.log"
    keys.write_text(f"{SECRET}inFile\n")
    settings.write_text(f"max_num_seqs: 7\napi_keys: [{SECRET}one]\napi_key_file: {keys}\nadmin_api_key: {SECRET}two\n")
    log.write_text(", ".join(f"sent {SECRET}{end}" for end in ("one", "inFile", "two", "env")))
    monkeypatch.setenv("PAGODA_ADMIN_API_KEY", f"{SECRET}env")
    monkeypatch.setenv("HF_TOKEN", f"{SECRET}hub")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET}otel")
    monkeypatch.setenv("PAGODA_MAX_NUM_SEQS", "9")
    path = tmp_path / "bundle.tar.gz"
    write_bundle(path, {"cpu": "a CPU"}, settings, [log])
    found = members(path)
    assert not [name for name, text in found.items() if SECRET in text]
    assert json.loads(found["settings.json"])["scheduler"]["max_num_seqs"] == 7
    assert json.loads(found["environment.json"])["PAGODA_MAX_NUM_SEQS"] == "9"
    assert json.loads(found["doctor.json"]) == {"cpu": "a CPU"}
    assert found["files/1-server.log"].count(HIDDEN) == 4
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="cannot be written"):
        write_bundle(path, {}, None, [])


def test_doctor_writes_a_bundle(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    log = tmp_path / "server.log"
    log.write_text("it stood still\n")
    command = [sys.executable, "-m", "pagoda", "doctor", "--cache-dir", str(tmp_path)]
    command += ["--bundle", str(path), "--include", str(log)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "look through it before you share it" in said.stderr
    found = members(path)
    assert json.loads(found["doctor.json"])["healthy"]
    assert found["files/1-server.log"] == "it stood still\n"
