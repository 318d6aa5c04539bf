"""benchmarks/make_random_gguf.py writes files that load from their own codes; loading takes a model's memory once."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file

from tests.models.packed_writer import Packing

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from make_random_gguf import KINDS, blocks, tensors, write  # noqa: E402
from make_random_model import SHAPES, Shape, config_of, weights_of, write_tokenizer  # noqa: E402

from pagoda.loading.gguf_blocks import dequantize_reference  # noqa: E402
from pagoda.loading.gguf_file import GGUFFile, GGUFTensor  # noqa: E402
from pagoda.loading.model_files import identify  # noqa: E402
from pagoda.loading.weight_memory import PreparedAs, weight_memory  # noqa: E402

SHAPE = Shape(512, 1024, 3, 8, 2, 64, 1500, 512, 10000.0)


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_have_the_spread_that_is_asked_for(kind: str):
    of = GGMLQuantizationType["Q4_K" if kind == "Q4_K_M" else kind]
    out = torch.empty(1 << 16)
    data = blocks(out.numel() // GGML_QUANT_SIZES[of][0], of, 0.02, np.random.default_rng(1))
    dequantize_reference(data.reshape(-1).data, of, out)
    assert torch.isfinite(out).all()
    assert 0.01 < out.std() < 0.04
    assert abs(out.mean()) < 0.004


def test_a_q4_k_m_mixes_its_types_and_equal_seeds_give_equal_files(tmp_path: Path):
    names = {name: of.name for name, _, of in tensors(SHAPES["llama-3.1-8b"], "Q4_K_M")}
    assert names["token_embd.weight"] == "Q4_K"
    assert names["output.weight"] == names["blk.0.ffn_down.weight"] == names["blk.31.attn_v.weight"] == "Q6_K"
    assert sum(of == "Q6_K" for of in names.values()) == 1 + 2 * 16  # as in published files
    for name in ("a", "b"):
        write(tmp_path / name, SHAPE, "Q4_K_M", seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    file = GGUFFile(tmp_path / "a")
    assert isinstance(file.tensors["token_embd.weight"], GGUFTensor)
    assert file.tensors["token_embd.weight"].type.name == "Q6_K"  # which is the head, too


def write_awq(folder: Path, shape: Shape) -> None:
    """Write a checkpoint of AWQ with random words: zero points as well, and scales of one size."""
    folder.mkdir()
    packing = Packing("awq", group=128)
    (folder / "config.json").write_text(json.dumps(config_of(shape) | {"quantization_config": packing.config()}))
    write_tokenizer(folder)
    rng = np.random.default_rng(0)

    def words(rows: int, columns: int) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(rng.bytes(4 * rows * columns), np.int32).reshape(rows, columns).copy())

    stored = weights_of(replace(shape, num_hidden_layers=1, intermediate_size=128), seed=0)
    norms = {name: tensor for name, tensor in stored.items() if tensor.dim() == 1}
    tensors = {name: tensor for name, tensor in stored.items() if ".layers." not in name}
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = (count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads))
    sizes = {"q": (hidden, heads), "k": (hidden, kv_heads), "v": (hidden, kv_heads), "o": (heads, hidden)}
    sizes = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
    sizes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {name.replace("model.layers.0", prefix): norm.clone() for name, norm in norms.items()}
        for name, (columns, rows) in sizes.items():
            tensors[f"{prefix}.{name}.qweight"] = words(columns, rows // 8)
            tensors[f"{prefix}.{name}.qzeros"] = words(columns // 128, rows // 8)
            tensors[f"{prefix}.{name}.scales"] = torch.full((columns // 128, rows), columns**-0.5 / 6.5).half()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "kind", ["Q4_K_M", pytest.param("BF16", marks=pytest.mark.slow), pytest.param("awq", marks=pytest.mark.slow)]
)
def test_loading_takes_anonymous_memory_once(kind: str, tmp_path: Path):
    """Without a file of packed weights, they are packed tensor by tensor: memory peaks at what stays."""
    shape = Shape(2048, 8192, 6, 32, 8, 64, 4096, 512, 10000.0)  # 350 million weights: 200 MiB in 4 bits
    path = tmp_path / ("awq" if kind == "awq" else "a.gguf")
    if kind == "awq":
        write_awq(path, shape)
    else:
        write(path, shape, kind)
    code = (
        "import json, re, sys, threading, time\n"
        "from pathlib import Path\n"
        "import pagoda.worker.loaded_model\n"
        "from pagoda import LLM, SamplingParams\n"
        "def anonymous():\n"
        "    return int(re.search(r'RssAnon:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "base, seen, ended = anonymous(), [], threading.Event()\n"
        "def watch():\n"
        "    while not ended.wait(0.002):\n"
        "        seen.append(anonymous())\n"
        "watcher = threading.Thread(target=watch)\n"
        "watcher.start()\n"
        "llm = LLM(sys.argv[1], max_model_len=256, kv_cache_memory='16MiB')\n"
        "ended.set(); watcher.join()\n"
        "text = llm.generate(['ab'], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids\n"
        "print(json.dumps([base, max(seen), anonymous(), len(text)]))\n"
    )
    environment = {**os.environ, "PAGODA_PACKED_CACHE_SIZE": "0"}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    base, peak, final, num_tokens = json.loads(done.stdout.splitlines()[-1])
    assert num_tokens == 2
    stored = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
    assert (final - base) * 1024 > 0.9 * stored
    assert peak - base <= 1.1 * (final - base)
    planned = weight_memory(identify(path), PreparedAs("bfloat16", None, packed=True, num_positions=257))
    # A KV cache of 16 MiB, what a step needs, and what the allocator holds of further imports: 24 to 70 MiB in 20 runs.
    assert (peak - base) * 1024 < planned + (96 << 20)
