"""Write quantised checkpoints as AutoAWQ, GPTQ and llm-compressor do, packed one by one, and their values."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output feature, of eight, in each 4 bits of a word


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint is packed.

    group: -1 for all of a row.   version: of GPTQ's format, 1 or 2.   keep: parts of the names of layers that stay
    floats.   settings: further ones of quantization_config; of compressed-tensors, of `weights`.   ordered: the groups
    are in a random order.   stored: the format of compressed-tensors.   block: of 8-bit floats, else a scale per row.
    """

    method: str
    group: int = 32
    symmetric: bool = False
    version: int = 1
    keep: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    bits: int = 4
    ordered: bool = False
    stored: str = "pack-quantized"
    block: tuple[int, int] | None = None
    activations: dict[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        if self.method == "compressed-tensors":
            return self._compressed_tensors()
        if self.method == "fp8":
            block = {"weight_block_size": list(self.block)} if self.block else {}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **block}
        own: dict[str, Any] = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            own |= {"version": "gemm", "zero_point": not self.symmetric, "modules_to_not_convert": list(self.keep)}
        else:
            own |= {"sym": self.symmetric, "desc_act": self.ordered}
            own |= {"checkpoint_format": "gptq_v2"} if self.version == 2 else {}
        return own | self.settings

    def _compressed_tensors(self) -> dict[str, Any]:
        """As llm-compressor writes it, without what is null."""
        weights: dict[str, Any] = {"num_bits": self.bits, "symmetric": self.symmetric, "dynamic": False}
        if self.stored == "float-quantized":
            block = {"block_structure": list(self.block)} if self.block else {}
            weights |= {"type": "float", "strategy": "block" if self.block else "channel", **block}
        else:
            grouped = self.group != -1
            weights |= {"type": "int", "strategy": "group" if grouped else "channel"}
            weights |= {"group_size": self.group} if grouped else {}
            weights |= {"actorder": "group"} if self.ordered else {}
        scheme = {
            "targets": ["Linear"],
            "weights": weights | self.settings,
            "input_activations": self.activations,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.stored,
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head", *self.keep],
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
        }


def write_packed(folder: Path, packing: Packing, packed: Path, values: Path, keep_g_idx: bool = True) -> None:
    """Pack the layers of a checkpoint of floats.

    packed: the folder for the packed form.   values: for the same model with the values of the codes, as float32.
    Scales and zero points are random, so the values are near those of the original only in size.
    """
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    codes: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(7)
    for name, tensor in tensors.items():
        floats[name] = tensor.float()
        layer = name.removesuffix(".weight")
        if tensor.dim() != 2 or ".layers." not in name or any(part in layer for part in packing.keep):
            codes[name] = tensor
            continue
        if packing.method == "fp8" or packing.stored == "float-quantized":
            stored, floats[name] = _as_fp8(tensor.float(), packing)
        else:
            columns = tensor.shape[1]
            group_of = np.arange(columns) // (columns if packing.group == -1 else packing.group)
            if packing.ordered:  # the layers that share an input have one order
                np.random.default_rng(columns).shuffle(group_of)
            stored, floats[name] = _pack(tensor.float().numpy(), group_of, packing, rng)
            if packing.method == "gptq" and keep_g_idx:
                stored["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
            elif packing.ordered:
                stored["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        codes |= {f"{layer}.{part}": value for part, value in stored.items()}
    for target, held, settings in (
        (packed, codes, config | {"quantization_config": packing.config()}),
        (values, floats, config),
    ):
        target.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(settings))


def _pack(
    weight: np.ndarray, group_of: np.ndarray, packing: Packing, rng: np.random.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors of a weight [out, in], and the values that they stand for."""
    (rows, columns), bits = weight.shape, packing.bits
    per_word, middle, groups = 32 // bits, 1 << (bits - 1), int(group_of.max()) + 1
    zeros = np.full((groups, rows), middle) if packing.symmetric else rng.integers(1, 2 * middle, (groups, rows))
    scales = np.empty((groups, rows), np.float16)
    codes = np.empty((rows, columns), np.int64)
    values = np.empty((rows, columns), np.float32)
    for g in range(groups):
        part = group_of == g
        scales[g] = np.abs(weight[:, part]).max(axis=1) / (middle - 1) * rng.uniform(0.9, 1.1, rows)
        scale = scales[g].astype(np.float32)[:, None]
        codes[:, part] = np.clip(np.round(weight[:, part] / scale) + zeros[g][:, None], 0, 2 * middle - 1)
        values[:, part] = scale * (codes[:, part] - zeros[g][:, None])
    made, held_scales = torch.from_numpy(values), torch.from_numpy(scales)
    if packing.method == "compressed-tensors":
        if packing.stored != "pack-quantized":
            stored = {"weight": torch.from_numpy(codes - 128).to(torch.int8)}
            if not packing.symmetric:
                stored["weight_zero_point"] = torch.from_numpy(zeros.T - 128).to(torch.int8)
        else:
            stored = {
                "weight_packed": _words(lambda j, i, k: codes[j, per_word * i + k], rows, columns // per_word, bits)
            }
            stored["weight_shape"] = torch.tensor(weight.shape)
            if not packing.symmetric:
                stored["weight_zero_point"] = _words(
                    lambda j, g, k: zeros[g, per_word * j + k], rows // per_word, groups, bits
                )
        return {**stored, "weight_scale": held_scales.T}, made
    if packing.method == "awq":
        order = _AWQ_ORDER
        stored = {"qweight": _words(lambda i, j, k: codes[8 * j + order[k], i], columns, rows // 8)}
        stored["qzeros"] = _words(lambda g, j, k: zeros[g, 8 * j + order[k]], groups, rows // 8)
    else:
        less = 1 if packing.version == 1 else 0
        stored = {"qweight": _words(lambda i, j, k: codes[j, per_word * i + k], columns // per_word, rows, bits)}
        stored["qzeros"] = _words(lambda g, j, k: zeros[g, per_word * j + k] - less, groups, rows // per_word, bits)
    return {**stored, "scales": held_scales}, made


def _words(code: Callable[[Any, Any, int], Any], rows: int, columns: int, bits: int = 4) -> torch.Tensor:
    """Return int32 [rows, columns] whose word (i, j) has code(i, j, k) in its bits from bits * k on.

    code: takes int64 [rows, columns] for i and for j, and returns as many codes.
    """
    i, j = np.indices((rows, columns))
    words = sum(code(i, j, k).astype(np.uint32) << np.uint32(bits * k) for k in range(32 // bits))
    return torch.from_numpy(np.asarray(words, np.uint32).view(np.int32))


def _as_fp8(weight: torch.Tensor, packing: Packing) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return 8-bit floats with scales per row or block as stored, and their values."""
    rows, columns = weight.shape
    high, wide = packing.block or (1, columns)
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scales[i, j]
    name = "weight_scale_inv" if packing.method == "fp8" and packing.block else "weight_scale"
    return {"weight": codes, name: scales}, values
