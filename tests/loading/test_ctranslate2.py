"""CTranslate2 files of Whisper models, written here byte by byte."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.loading.ctranslate2 import CTranslate2File, token_settings
from pagoda.loading.model_config import summarize_weights
from pagoda.loading.model_files import identify
from pagoda.loading.pieces import Region
from pagoda.loading.weights import open_weights

HIDDEN, FFN, MELS, VOCAB = 8, 16, 4, 12
_TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "uint16": 5}


def variables(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a model of one encoder and two decoder layers, float32."""

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 1, shape).astype(np.float32)

    found: dict[str, np.ndarray] = {
        "encoder/conv1/weight": draw(HIDDEN, MELS, 3),
        "encoder/conv1/bias": draw(HIDDEN),
        "encoder/position_encodings/encodings": draw(6, HIDDEN),
        "decoder/position_encodings/encodings": draw(5, HIDDEN),
        "decoder/embeddings/weight": draw(VOCAB, HIDDEN),
        "encoder/layer_norm/gamma": draw(HIDDEN),
        "decoder/layer_norm/beta": draw(HIDDEN),
    }
    for stack, layer in (("encoder", 0), ("decoder", 0), ("decoder", 1)):
        name = f"{stack}/layer_{layer}"
        found[f"{name}/self_attention/linear_0/weight"] = draw(3 * HIDDEN, HIDDEN)
        found[f"{name}/self_attention/linear_0/bias"] = draw(3 * HIDDEN)
        found[f"{name}/ffn/linear_0/weight"] = draw(FFN, HIDDEN)
        if stack == "decoder":
            found[f"{name}/attention/linear_1/weight"] = draw(2 * HIDDEN, HIDDEN)
    for stack in ("encoder", "decoder"):
        found |= {f"{stack}/num_heads": np.int16(2), f"{stack}/pre_norm": np.int8(1), f"{stack}/activation": np.int8(3)}
    return found


def write(folder: Path, found: dict[str, np.ndarray], spec: str = "WhisperSpec", version: int = 6) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    data = struct.pack("<I", version) + text(spec) + struct.pack("<II", 3, len(found))
    for name, value in found.items():
        array = np.asarray(value)
        head = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += text(name) + head + struct.pack("<BI", _TYPES[array.dtype.name], array.nbytes) + array.tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(data + struct.pack("<I", 0))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(
        json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [3], "lang_ids": [4], "alignment_heads": [[1, 0]]})
    )


def stored_as(dtype: str, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights in another form, as CTranslate2 converts them."""
    result: dict[str, np.ndarray] = {}
    for name, value in found.items():
        is_matrix = name.endswith("/weight") and value.ndim == 2
        if value.dtype != np.float32 or dtype == "float32":
            result[name] = value
        elif dtype == "bfloat16":
            result[name] = (value.view(np.uint32) >> 16).astype(np.uint16)
        elif dtype == "float16" or not is_matrix:
            result[name] = value.astype(np.float16 if dtype == "float16" else np.float32)
        else:
            largest = np.abs(value).max(axis=1) if dtype == "int8" else np.abs(value).max()
            scale = np.asarray((127 if dtype == "int8" else 1023) / largest, np.float32)
            codes = np.rint(value * (scale[:, None] if scale.ndim else scale))
            result |= {name: codes.astype(dtype), f"{name}_scale": scale}
    return result


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 0), ("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2), ("int16", 3e-3)]
)
def test_weights_of_every_form_have_transformers_names(tmp_path: Path, dtype: str, tolerance: float) -> None:
    found = variables(np.random.default_rng(0))
    write(tmp_path, stored_as(dtype, found))
    files = identify(tmp_path)
    assert files.format == "ctranslate2"
    weights = open_weights(files)
    fused = found["decoder/layer_1/self_attention/linear_0/weight"]
    expected = {
        "model.encoder.conv1.weight": found["encoder/conv1/weight"],
        "model.decoder.embed_tokens.weight": found["decoder/embeddings/weight"],
        "model.decoder.embed_positions.weight": found["decoder/position_encodings/encodings"],
        "model.encoder.layer_norm.weight": found["encoder/layer_norm/gamma"],
        "model.decoder.layers.1.self_attn.q_proj.weight": fused[:HIDDEN],
        "model.decoder.layers.1.self_attn.v_proj.weight": fused[2 * HIDDEN :],
        "model.decoder.layers.0.encoder_attn.v_proj.weight": found["decoder/layer_0/attention/linear_1/weight"][
            HIDDEN:
        ],
        "model.encoder.layers.0.fc1.weight": found["encoder/layer_0/ffn/linear_0/weight"],
        "model.encoder.layers.0.self_attn.q_proj.bias": found["encoder/layer_0/self_attention/linear_0/bias"][:HIDDEN],
    }
    for name, values in expected.items():
        assert name in weights
        assert weights.shape(name) == values.shape
        out = torch.empty(values.shape)
        weights.read_into(name, out)
        np.testing.assert_allclose(out.numpy(), values, atol=tolerance, rtol=tolerance)
    assert "model.encoder.layers.0.self_attn.k_proj.bias" not in weights  # zeros, which transformers does not store
    part = torch.empty(3, 2)
    weights.read_into("model.encoder.layers.0.fc1.weight", part, Region(None, range(4, 7), range(1, 3)))
    np.testing.assert_allclose(
        part.numpy(), found["encoder/layer_0/ffn/linear_0/weight"][4:7, 1:3], atol=tolerance, rtol=tolerance
    )


def test_the_settings_are_read_from_shapes(tmp_path: Path) -> None:
    write(tmp_path, variables(np.random.default_rng(0)))
    settings = CTranslate2File(tmp_path).settings()
    assert settings["d_model"] == HIDDEN
    assert (settings["encoder_layers"], settings["decoder_layers"]) == (1, 2)
    assert (settings["max_source_positions"], settings["max_target_positions"]) == (6, 5)
    assert (settings["vocab_size"], settings["num_mel_bins"], settings["decoder_ffn_dim"]) == (VOCAB, MELS, FFN)
    assert settings["encoder_attention_heads"] == 2
    assert token_settings(tmp_path) == {
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [3],
        "alignment_heads": [[1, 0]],
    }
    assert summarize_weights(identify(tmp_path)).bytes_by_type["float32"] > 0


def test_other_models_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    found = variables(np.random.default_rng(0))
    write(tmp_path / "a", found, spec="TransformerSpec")
    with pytest.raises(ConfigError, match=r"'TransformerSpec' in version 6 .* pagoda reads WhisperSpec"):
        CTranslate2File(tmp_path / "a")
    write(tmp_path / "b", found)
    whole = (tmp_path / "b" / "model.bin").read_bytes()
    for size in (0, 3, 40, len(whole) // 2):
        (tmp_path / "b" / "model.bin").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"model.bin: (cannot be read|truncated or corrupt)"):
            CTranslate2File(tmp_path / "b")
    write(tmp_path / "c", found | {"decoder/activation": np.int8(0)})
    with pytest.raises(ConfigError, match=r"decoder/activation = 0 is not supported"):
        CTranslate2File(tmp_path / "c").settings()
    for value in (np.int8([1, 1]), np.float32(1)):
        write(tmp_path / "c", found | {"decoder/pre_norm": value})
        with pytest.raises(ConfigError, match=r"decoder/pre_norm is not an integer"):
            CTranslate2File(tmp_path / "c").settings()
    write(tmp_path / "d", found | {"encoder/layer_0/ffn/linear_0/weight": np.zeros((FFN, HIDDEN), np.int8)})
    with pytest.raises(ConfigError, match=r"linear_0/weight is int8, which is not supported"):
        CTranslate2File(tmp_path / "d").read("model.encoder.layers.0.fc1.weight")


def test_a_changed_byte_is_an_error_that_names_the_file_or_gives_values(tmp_path: Path) -> None:
    write(tmp_path, variables(np.random.default_rng(0)))
    path, rng, refused = tmp_path / "model.bin", np.random.default_rng(1), list[str]()
    whole = path.read_bytes()
    for at in rng.choice(len(whole), 600):
        changed = bytearray(whole)
        changed[at] = rng.choice((0, 1, 2, 9, 255))
        path.write_bytes(changed)
        try:
            file = CTranslate2File(tmp_path)
            file.settings()
            for name in file.parameters:
                file.read(name)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(message.startswith(str(path)) for message in refused)
