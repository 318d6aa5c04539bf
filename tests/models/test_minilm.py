"""MiniLM's real weights: the vectors of sentence-transformers."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from pagoda.base.pooling import PoolingKind
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.kernels.native_ops import NativeOps
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.cached_models import cached_model
from tests.device_under_test import DeviceUnderTest
from tests.models.tiny_encoders import states

TEXTS = [
    "The cat sits on the mat.",
    "A feline is resting on a rug.",
    "Stock markets fell sharply on Tuesday after the central bank raised its rates.",
    "",
    "¿Dónde está la biblioteca? Übermäßig, naïve, 東京, 👩‍🚀",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "Photosynthesis converts light into chemical energy. " * 20,
]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_vectors_are_those_of_sentence_transformers(kernels: str, on: DeviceUnderTest) -> None:
    from sentence_transformers import SentenceTransformer

    files = cached_model("minilm-l6")
    theirs = SentenceTransformer(str(files.path), device="cpu")
    tokenizer = load_tokenizer(files)
    rows = [list(tokenizer.encode(text)) for text in TEXTS]
    assert rows == [theirs.tokenizer(text)["input_ids"] for text in TEXTS]
    ops = on.ops(kernels)
    model = load_model(files, ops, torch.float32, on.device)
    plan = model.pooling
    assert (plan.kind, plan.normalize, plan.max_seq_length) == (PoolingKind.MEAN, True, 256)
    forward = ForwardRunner(model, ops, recorder=Programs(ops) if isinstance(ops, NativeOps) else None)
    pooled = torch.stack([part.mean(0) for part in states(forward, rows, on.device)]).to(on.device)
    ours = torch.nn.functional.normalize(forward.embed(pooled, torch.float32).cpu(), dim=1)
    torch.testing.assert_close(ours, theirs.encode(TEXTS, convert_to_tensor=True), atol=1e-5, rtol=1e-5)


def as_gguf(files: ModelFiles, path: Path) -> ModelFiles:
    """Write MiniLM as llama.cpp's converter does: tokens that begin words are marked, not those that continue them."""
    config = json.loads((files.path / "config.json").read_text())
    vocab = json.loads((files.path / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [t if t in special else t.removeprefix("##") if t.startswith("##") else f"\u2581{t}" for t in tokens]
    )
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_unk_token_id(vocab["[UNK]"])
    writer.add_bos_token_id(vocab["[CLS]"])
    writer.add_sep_token_id(vocab["[SEP]"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(files.path / "model.safetensors").items():
        stored = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if stored is not None:
            writer.add_tensor(stored, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return identify(path)


@torch.inference_mode()
def test_a_gguf_has_the_same_tokens_and_vectors(tmp_path: Path, on: DeviceUnderTest) -> None:
    files = cached_model("minilm-l6")
    other = as_gguf(files, tmp_path / "minilm.gguf")
    ours, theirs = load_tokenizer(other), load_tokenizer(files)
    rows = [list(theirs.encode(text)) for text in TEXTS]
    assert [list(ours.encode(text)) for text in TEXTS] == rows
    assert [ours.decode(row) for row in rows] == [theirs.decode(row) for row in rows]
    assert ours.facts.special_token_ids == theirs.facts.special_token_ids
    assert ours.facts.added == theirs.facts.added
    found: list[torch.Tensor] = []
    for of in (other, files):
        ops = on.ops("torch")
        model = load_model(of, ops, torch.float32, on.device)
        assert (model.pooling.kind, model.pooling.normalize) == (PoolingKind.MEAN, True)
        found.append(torch.cat(states(ForwardRunner(model, ops), rows, on.device)))
    assert torch.equal(*found)
