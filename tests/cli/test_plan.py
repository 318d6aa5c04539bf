"""`pagoda plan` for models whose weights are not on this machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

from pagoda.base.config import EngineConfig
from pagoda.base.errors import CapacityError
from pagoda.cli.bench.workload import report
from pagoda.cli.console import print_table
from pagoda.cli.main import main
from pagoda.cli.plan import Plan, make_plan
from tests.cached_models import cached_model
from tests.engine.images.families import write_model
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import make_model, save
from tests.models.tiny_whisper import write_whisper

SMALL = {"max_model_len": 256, "kv_cache_memory": "64MiB"}
FLAGS = ("--max-model-len", "256", "--kv-cache-memory", "64MiB", "--json")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words, *FLAGS])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["smollm2-135m", "minilm-l6"])
def test_a_plan_without_the_weights_is_that_with_them_as_floats(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    cached_model(name)
    there = make_plan(EngineConfig.from_options(model=name, quantization="none", **SMALL))
    without = plan(capsys, name, "--cache-dir", str(tmp_path), "--quantization", "none")
    for figure in ("weights_memory", "kv_bytes_per_token", "num_blocks", "dtype", "architecture", "max_model_len"):
        assert without[figure] == getattr(there, figure), figure
    assert without["path"] == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [(), ("--quantization", "gguf")])
def test_a_gguf_file_that_is_not_fetched_is_planned_as_the_codes_it_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    cached_model("smollm2-135m")
    there = make_plan(EngineConfig.from_options(model="smollm2-135m", **SMALL))
    without = plan(capsys, "smollm2-135m", "--cache-dir", str(tmp_path), *flags)
    assert without["weights_as"] == there.weights_as == "gguf"
    assert without["weights_memory"] == without["weights_disk"] == pytest.approx(there.weights_memory, rel=0.03)
    parts = [one["weights"] for one in without["layouts"] if one["pipeline_parallel_size"] == 1]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] == without["weights_memory"]


def test_a_gguf_file_that_is_not_fetched_says_by_what_rule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "gemma3-270m", "--kv-cache-memory", "64MiB", "--cache-dir", str(tmp_path)])
    assert "about 241.4 MiB in memory as gguf, by the size of the file\n" in capsys.readouterr().out
    as_floats = plan(capsys, "gemma3-270m", "--dtype", "bfloat16", "--cache-dir", str(tmp_path))
    assert as_floats["weights_as"] == "bfloat16"


@pytest.mark.parametrize(("kind", "held"), [("F16", "bfloat16"), ("Q8_0", "gguf")])
def test_a_gguf_of_floats_is_held_in_the_compute_dtype(tmp_path: Path, kind: str, held: str) -> None:
    write_gguf(make_model("llama"), tmp_path / "model.gguf", GGMLQuantizationType[kind])
    config = EngineConfig.from_options(model=str(tmp_path / "model.gguf"), max_model_len=64, kv_cache_memory="64MiB")
    assert make_plan(config).weights_as == held


def test_an_error_about_a_bare_config_names_its_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoneForCausalLM"]}')
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path)])
    err = capsys.readouterr().err
    assert f"{tmp_path}/config.json: unknown model architecture 'NoneForCausalLM'" in err
    assert "did you mean" not in err


def test_a_folder_with_only_config_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A mixture of experts with biases in attention, from the declarations alone."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan(capsys, str(tmp_path))
    attention = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 2 * 16
    experts = 4 * 3 * 64 * 32 + 4 * 64
    assert made["num_parameters"] == 2 * 1000 * 64 + 2 * (attention + experts + 2 * 64) + 64
    assert made["weights_disk"] == 4 * made["num_parameters"]
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **config,
                "quantization_config": {
                    "quant_method": "awq",
                    "bits": 4,
                    "group_size": 32,
                    "zero_point": True,
                    "version": "gemm",
                },
            }
        )
    )
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path)])
    assert "packed weights is not known from config.json" in capsys.readouterr().err


def test_a_folder_without_weights_has_images_of_the_size_that_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_model("qwen2_vl", tmp_path)
    there = make_plan(EngineConfig.from_options(model=str(tmp_path), **SMALL))
    (tmp_path / "model.safetensors").unlink()
    without = plan(capsys, str(tmp_path))
    assert without["largest_item"] == there.largest_item
    assert without["is_largest_known"]
    (tmp_path / "preprocessor_config.json").unlink()
    bare = plan(capsys, str(tmp_path))
    assert bare["largest_item"] > there.largest_item
    assert not bare["is_largest_known"]
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), *FLAGS[:-1]])
    assert "tokens, the encoder's most: there is no preprocessor_config.json\n" in capsys.readouterr().out


def test_states_are_shown_next_to_the_kv_of_attention(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = plan(capsys, str(save(make_model("lfm2", max_position_embeddings=256), tmp_path)), "--dtype", "float32")
    assert made["kv_bytes_per_token"] == 2 * 32 * 4  # of one layer
    assert made["state_bytes"] == 3 * 2 * 96 * 4
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--dtype", "float32", *FLAGS[:-1]])
    said = capsys.readouterr().out
    assert "2.2 KiB: up to three per running sequence, and one per 16 cached tokens\n" in said
    assert f"{made['num_states']:,} fit (" in said


def test_a_model_of_states_alone_has_blocks_of_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = plan(capsys, str(save(make_model("mamba2"), tmp_path)), "--dtype", "float32")
    assert (made["kv_bytes_per_token"], made["num_states"], made["state_tokens"]) == (0, 0, 32)
    assert made["state_bytes"] == 3 * 4 * (3 * (192 + 64) + 6 * 16 * 32)
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--dtype", "float32", *FLAGS[:-1]])
    assert "KV per token" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "write",
    [
        write_whisper,
        lambda folder: save(make_model("gemma2"), folder),
        lambda folder: save(make_model("lfm2", max_position_embeddings=512), folder),
    ],
)
def test_an_engine_starts_with_the_kv_that_a_layout_names(write: Callable[[Path], object], tmp_path: Path) -> None:
    """With less, a request of the longest text would not fit: that of Whisper has encoder tokens in the cache, too, and
    next to attention, states get more than one request has.
    """
    write(tmp_path)

    def plan_with(kv_cache_memory: int) -> Plan:
        options = {"model": str(tmp_path), "block_size": 16, "kv_cache_memory": kv_cache_memory}
        return make_plan(EngineConfig.from_options(**options))

    needed = plan_with(64 << 20).layouts[0].kv_bytes
    assert set(plan_with(needed).requests_by_length.values()) == {1}
    with pytest.raises(CapacityError):
        plan_with(needed - 1)


def test_piped_output_is_neither_wrapped_nor_padded(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("name", "a " * 200 + "b", "s"), ("longer name", "1", "")]
    print_table(rows, right=(1,))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"name         {'a ' * 200}b  s"
    assert second == f"longer name  {'1'.rjust(401)}"
    report({"in": 12345, "out_tok_s": 3.5, "secs": 2, "p50_s": 0.1, "engine": "x"}, False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["input", "tokens", "12,345"],
        ["output", "3.5", "tokens/s"],
        ["time", "2", "s"],
        ["p50", "0.1", "s"],
        ["engine", "x"],
    ]
