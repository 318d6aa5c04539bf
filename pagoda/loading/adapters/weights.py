"""Read an adapter's tensors into the pieces that the low-rank ops take."""

import torch
from safetensors import SafetensorError, safe_open

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError
from pagoda.kernels.low_rank.table import LowRankPiece
from pagoda.layers.lora_targets import LoRAShare, LoRATarget
from pagoda.layers.parameter import Parameter
from pagoda.loading.adapters.files import WEIGHTS_FILE, AdapterFiles, AdapterTargets


def read_adapter(
    files: AdapterFiles, targets: AdapterTargets, device: torch.device
) -> dict[Parameter[object], list[LowRankPiece]]:
    """Return this rank's pieces of each adapted parameter, in float32 with the scale applied.

    Raises ConfigError for a file that changed since it was checked, and for values that are not finite.
    """
    found: dict[Parameter[object], list[LowRankPiece]] = {}
    path = files.folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as opened:

            def load(name: str) -> torch.Tensor:
                tensor = opened.get_tensor(name).to(device=device, dtype=torch.float32)
                if not torch.isfinite(tensor).all():
                    raise ConfigError(f"{path}: tensor {shorten(name)!r} has values that are not finite")
                return tensor

            for module in files.modules:
                target: LoRATarget = targets.targets[module.target]
                share = target.share()
                if share is None:
                    continue
                a, b = load(module.a), _rows(load(module.b), target, share) * module.scale
                bias = None
                if module.bias is not None and share.bias:
                    bias = _rows(load(module.bias), target, share) * module.scale
                piece = LowRankPiece(a[:, share.columns.start : share.columns.stop], b, share.first_row, bias)
                found.setdefault(target.parameter, []).append(piece)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {shorten(str(error))}") from None
    return found


def _rows(tensor: torch.Tensor, target: LoRATarget, share: LoRAShare) -> torch.Tensor:
    order = target.tensor_rows()
    if order is not None:
        tensor = tensor[order]
    parts = [tensor[rows.start : rows.stop] for rows in share.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_copies(files: AdapterFiles) -> dict[str, torch.Tensor]:
    """Return the copies of the model's embedding and head that the file has, [vocab, hidden], by target.

    Raises ConfigError for a file that changed since it was checked.
    """
    if not files.copies:
        return {}
    path = files.folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as opened:
            return {target: opened.get_tensor(name) for target, name in files.copies.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {shorten(str(error))}") from None
