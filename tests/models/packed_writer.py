"""Write checkpoints as AutoAWQ and GPTQ do, with 4-bit weights packed one element at a time, and their values."""

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
    floats.   settings: further ones of quantization_config.
    """

    method: str
    group: int = 32
    symmetric: bool = False
    version: int = 1
    keep: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        own: dict[str, Any] = {"quant_method": self.method, "bits": 4, "group_size": self.group}
        if self.method == "awq":
            own |= {"version": "gemm", "zero_point": not self.symmetric, "modules_to_not_convert": list(self.keep)}
        else:
            own |= {"sym": self.symmetric, "desc_act": False}
            own |= {"checkpoint_format": "gptq_v2"} if self.version == 2 else {}
        return own | self.settings


def write_packed(folder: Path, packing: Packing, packed: Path, values: Path, keep_g_idx: bool = True) -> None:
    """Pack the layers of a checkpoint of floats.

    packed: the folder for AWQ's or GPTQ's form.   values: for the same model with the values of the codes, as
    float32. Scales and zero points are random, so the values are near those of the original only in size.
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
        stored, floats[name] = _pack(tensor.float().numpy(), packing, rng)
        if packing.method == "gptq" and keep_g_idx:
            group = tensor.shape[1] if packing.group == -1 else packing.group
            stored["g_idx"] = torch.arange(tensor.shape[1], dtype=torch.int32) // group
        codes |= {f"{layer}.{part}": value for part, value in stored.items()}
    for target, held, settings in (
        (packed, codes, config | {"quantization_config": packing.config()}),
        (values, floats, config),
    ):
        target.mkdir(parents=True, exist_ok=True)
        save_file(held, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(settings))


def _pack(
    weight: np.ndarray, packing: Packing, rng: np.random.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors of a weight [out, in], and the values that they stand for."""
    rows, columns = weight.shape
    group = columns if packing.group == -1 else packing.group
    groups = -(-columns // group)
    zeros = np.full((groups, rows), 8) if packing.symmetric else rng.integers(1, 16, (groups, rows))
    scales = np.empty((groups, rows), np.float16)
    codes = np.empty((rows, columns), np.int64)
    values = np.empty((rows, columns), np.float32)
    for g in range(groups):
        part = slice(g * group, min(columns, (g + 1) * group))
        scales[g] = np.abs(weight[:, part]).max(axis=1) / 7 * rng.uniform(0.9, 1.1, rows)
        scale = scales[g].astype(np.float32)[:, None]
        codes[:, part] = np.clip(np.round(weight[:, part] / scale) + zeros[g][:, None], 0, 15)
        values[:, part] = scale * (codes[:, part] - zeros[g][:, None])
    if packing.method == "awq":
        order = _AWQ_ORDER
        stored = {"qweight": _words(lambda i, j, k: codes[8 * j + order[k], i], columns, rows // 8)}
        stored["qzeros"] = _words(lambda g, j, k: zeros[g, 8 * j + order[k]], groups, rows // 8)
    else:
        less = 1 if packing.version == 1 else 0
        stored = {"qweight": _words(lambda i, j, k: codes[j, 8 * i + k], columns // 8, rows)}
        stored["qzeros"] = _words(lambda g, j, k: zeros[g, 8 * j + k] - less, groups, rows // 8)
    return {**stored, "scales": torch.from_numpy(scales)}, torch.from_numpy(values)


def _words(code: Callable[[int, int, int], Any], rows: int, columns: int) -> torch.Tensor:
    """Return int32 [rows, columns] whose word (i, j) has code(i, j, k) in its bits 4 k to 4 k + 3."""
    words = np.zeros((rows, columns), np.uint32)
    for i in range(rows):
        for j in range(columns):
            words[i, j] = sum(int(code(i, j, k)) << (4 * k) for k in range(8))
    return torch.from_numpy(words.view(np.int32))
