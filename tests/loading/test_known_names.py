"""Names that people know from other programs, and what they name here."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagoda.base.config import ModelConfig
from pagoda.base.errors import ConfigError
from pagoda.cli.arguments import spelled_out
from pagoda.loading.catalog import CATALOG
from pagoda.loading.fetch_hub import HubModel
from pagoda.loading.known_names import KNOWN_NAMES, full_name, known_size
from pagoda.loading.resolve import names_a_model, require_cached, source_of


@pytest.mark.parametrize(
    ("name", "repo_id", "quantization"),
    [
        ("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M"),
        ("Llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M"),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF", "Q8_0"),
        ("hf.co/org/name:Q4_K_M", "org/name", "Q4_K_M"),
        ("https://huggingface.co/org/name", "org/name", None),
        ("org/name-GGUF", "org/name-GGUF", "Q4_K_M"),
        ("hf.co/org/name-gguf:Q8_0", "org/name-gguf", "Q8_0"),
    ],
)
def test_a_name_of_another_program_is_a_hub_id(name: str, repo_id: str, quantization: str | None) -> None:
    assert source_of(ModelConfig(model=name)) == HubModel(repo_id, quantization)
    assert names_a_model(name)


def test_a_name_may_be_one_of_the_catalog() -> None:
    assert source_of(ModelConfig(model="smollm2:135m")) == CATALOG["smollm2-135m"].wheel


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    assert source_of(ModelConfig(model="qwen3")) == Path("qwen3")


def test_every_line_of_the_table_is_a_model_with_its_size() -> None:
    for name, known in KNOWN_NAMES.items():
        assert name == name.lower()
        assert known.model in CATALOG or re.fullmatch(r"[\w.-]+/[\w.-]+-GGUF:[A-Z0-9_]+", known.model), name
        assert full_name(name) == known.model
        if known.model in CATALOG:
            assert round(CATALOG[known.model].num_bytes, -6) == known.num_bytes
        if ":" not in name:  # what a family stands for is one of its members
            assert any(one.startswith(f"{name}:") and KNOWN_NAMES[one] == known for one in KNOWN_NAMES)


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        ("llama3.2:90b", "'llama3.2:3b', 'llama3.2:1b' or 'llama3.2'"),
        ("qwen3-0.6b", "'qwen3:0.6b'"),
        ("smollm-135m", "'smollm2-135m'"),
        ("zzzzzz", "`pagoda list` has names"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name: str, proposed: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown model '{name}'.*{re.escape(proposed)}"):
        source_of(ModelConfig(model=name))
    assert not names_a_model(name)


@pytest.mark.parametrize("flag", ["-hf", "-hfr", "--hf-repo"])
def test_llama_cpps_flag_is_the_model(flag: str) -> None:
    flags = {"--model": SimpleNamespace(name="model", is_flag=False, multiple=False)}
    assert spelled_out([flag, "org/name:Q8_0"], flags, True) == (["--model", "org/name:Q8_0"], {"model"})


def test_what_is_not_fetched_is_told_with_its_size(tmp_path: Path) -> None:
    assert known_size("llama3.2") == 2_019_000_000
    message = r"'llama3\.2' is not fetched yet: .*:Q4_K_M \(1\.9 GiB\) would be.*; x, or run `pagoda pull llama3.2`"
    with pytest.raises(ConfigError, match=message):
        require_cached(ModelConfig(model="llama3.2", cache_dir=str(tmp_path)), "x, or ")
