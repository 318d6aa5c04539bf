"""Tiny random checkpoints of the models that see, made by transformers, and pictures for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Idefics3Config,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from pagoda.core.request import MediaItem
from tests.models.tiny import VOCAB, save

IMAGE = 3
"""The id of the token that stands for an image's rows."""

_TEXT = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EVEN_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
}


def _idefics3() -> PretrainedConfig:
    tower = {**_TOWER, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = {**_TEXT, **_EVEN_HEADS, "tie_word_embeddings": True}
    return Idefics3Config(
        text_config=text, vision_config=tower, scale_factor=3, image_token_id=IMAGE, tie_word_embeddings=True
    )


def _qwen2_5_vl() -> PretrainedConfig:
    tower = {
        "depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 80, "patch_size": 4, "window_size": 16,
        "fullatt_block_indexes": [1], "out_hidden_size": 96,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {
        **_TEXT, **_EVEN_HEADS, "model_type": "qwen2_5_vl_text", "rope_parameters": rope, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, vision_start_token_id=4, vision_end_token_id=5,
        video_token_id=6, tie_word_embeddings=False,
    )  # fmt: skip


QWEN3_TOWER = {
    "depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 80, "patch_size": 4, "out_hidden_size": 96,
    "num_position_embeddings": 25,
}  # fmt: skip
_QWEN3_IDS = {
    "image_token_id": IMAGE, "vision_start_token_id": 4, "vision_end_token_id": 5, "video_token_id": 6,
    "tie_word_embeddings": False,
}  # fmt: skip


_QWEN3_DEEP_TOWER = {**QWEN3_TOWER, "deepstack_visual_indexes": [0, 2]}
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN3_TEXT = {**_TEXT, **_EVEN_HEADS, "head_dim": 16, "rope_parameters": _QWEN3_ROPE}


def _qwen3_vl() -> PretrainedConfig:
    text = {**_QWEN3_TEXT, "model_type": "qwen3_vl_text"}
    return Qwen3VLConfig(text_config=text, vision_config=_QWEN3_DEEP_TOWER, **_QWEN3_IDS)


def _qwen3_vl_moe() -> PretrainedConfig:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}
    text = {**_QWEN3_TEXT, **experts, "model_type": "qwen3_vl_moe_text"}
    return Qwen3VLMoeConfig(text_config=text, vision_config=_QWEN3_DEEP_TOWER, **_QWEN3_IDS)


def _qwen3_5() -> PretrainedConfig:
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }  # fmt: skip
    text = {
        **_TEXT, **_EVEN_HEADS, "head_dim": 16, "model_type": "qwen3_5_text", "rope_parameters": rope,
        "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    return Qwen3_5Config(text_config=text, vision_config=QWEN3_TOWER, **_QWEN3_IDS)


def _gemma3() -> PretrainedConfig:
    tower = {**_TOWER, "model_type": "siglip_vision_model", "hidden_size": 48}
    text = {
        **_TEXT, **_EVEN_HEADS, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    return Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=9, image_token_index=IMAGE, boi_token_index=4,
        eoi_token_index=5,
    )  # fmt: skip


def _mistral3() -> PretrainedConfig:
    tower = {**_TOWER, "model_type": "pixtral", "image_size": 48}
    text = {**_TEXT, **_EVEN_HEADS, "model_type": "mistral", "head_dim": 16}
    return Mistral3Config(
        text_config=text, vision_config=tower, image_token_index=IMAGE, spatial_merge_size=2, tie_word_embeddings=False
    )


CONFIGS = {
    "smolvlm": lambda: SmolVLMConfig(
        text_config=_TEXT, vision_config=_TOWER, scale_factor=2, image_token_id=IMAGE, tie_word_embeddings=False
    ),
    "idefics3": _idefics3,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
    "qwen3-vl-moe": _qwen3_vl_moe,
    "qwen3.5": _qwen3_5,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
}

QWEN = ("qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5")
NEEDS_SEPARATORS = (*QWEN, "gemma3")
"""transformers takes pictures without a token between them for one."""

_GRIDS = ((1, 6, 10), (1, 8, 4), (1, 2, 2), (1, 4, 12))
"""Rows and columns of patches of Qwen's pictures: windows cut off on either side, one smaller than a window. And of
Mistral's, without the first number."""

_ROW_END, _IMAGE_END = 4, 5
"""Tokens of Mistral's pictures, after each row of tokens and after the last one."""


def make_vision(name: str, seed: int = 0) -> PreTrainedModel:
    """A model in float32 whose every parameter is random and matters."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    kind = type(config).__name__.replace("Config", "ForConditionalGeneration")
    model = getattr(transformers, kind)(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ("norm" in key or "ln_q" in key) and key.endswith("weight"):
                is_offset = name == "gemma3" and "vision_tower" not in key  # it multiplies by 1 + weight
                parameter.copy_((0 if is_offset else 1) + torch.randn_like(parameter) * 0.3)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
    model.tie_weights()
    return model


def save_vision(model: PreTrainedModel, folder: Path) -> Path:
    """Write a checkpoint folder as publishers do, and return it: Qwen3-VL-MoE's experts are stored transposed."""
    save(model, folder)
    if model.config.model_type == "qwen3_vl_moe":
        path = folder / "model.safetensors"
        turned = {
            name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(path).items()
        }
        save_file(turned, path, metadata={"format": "pt"})
    return folder


def picture(name: str, number: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return features and grid of picture `number`, as an item of a request has them."""
    generator = torch.Generator().manual_seed(100 + number)
    if name in QWEN:
        grid = _GRIDS[number % len(_GRIDS)]
        return torch.randn(grid[1] * grid[2], 3 * 2 * 4 * 4, generator=generator).numpy(), grid
    tower = CONFIGS[name]().vision_config
    if name == "mistral3":
        _, *grid = _GRIDS[number % len(_GRIDS)]
        return torch.randn(grid[0] * grid[1], 3 * tower.patch_size**2, generator=generator).numpy(), tuple(grid)
    side = tower.image_size // tower.patch_size
    return torch.randn(side * side, 3 * tower.patch_size**2, generator=generator).numpy(), (side, side)


def picture_inputs(name: str, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return some pictures as transformers' model takes them, beside the tokens."""
    features, grids = zip(*(picture(name, number) for number in numbers), strict=True)
    values = [torch.from_numpy(one) for one in features]
    if name in QWEN:
        return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}
    patch = CONFIGS[name]().vision_config.patch_size
    images = [
        one.view(*grid, 3, patch, patch).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        for one, grid in zip(values, grids, strict=True)
    ]
    if name == "mistral3":
        sizes = torch.tensor([one.shape[1:] for one in images])
        height, width = sizes.amax(0).tolist()
        padded = [torch.nn.functional.pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in images]
        return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
    return {"pixel_values": torch.stack(images) if name == "gemma3" else torch.stack(images)[None]}


def tokens_of_picture(name: str, number: int) -> list[int]:
    """Return the prompt's tokens that stand for picture `number`."""
    config, (features, grid) = CONFIGS[name](), picture(name, number)
    if name == "gemma3":
        return [IMAGE] * config.mm_tokens_per_image
    if name == "mistral3":
        rows, columns = (size // config.spatial_merge_size for size in grid)
        return [*([*([IMAGE] * columns), _ROW_END] * rows)[:-1], _IMAGE_END]
    merged = config.vision_config.spatial_merge_size if name in QWEN else config.scale_factor
    return [IMAGE] * (len(features) // merged**2)


def item(name: str, number: int, offset: int) -> MediaItem:
    """Return picture `number` as an item of a request."""
    features, grid = picture(name, number)
    return MediaItem(f"picture {number}", offset, len(tokens_of_picture(name, number)), features, grid)
