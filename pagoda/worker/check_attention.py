"""Check that an attention backend has what a model needs."""

import torch

from pagoda.kernels.attention.backends import AttentionNeeds, check_needs
from pagoda.layers.attention import Attention
from pagoda.layers.module import walk
from pagoda.models.base import Model


def check_attention(backend: str, model: Model, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise ConfigError if the attention backend of this name cannot compute the model.

    dtype: of its activations.   kv_dtype: of its KV cache.
    """
    layers = [layer for _, layer in walk(model) if isinstance(layer, Attention) and layer.keeps_kv]
    head_dims = frozenset(layer.heads.dim for layer in layers)
    check_needs(backend, AttentionNeeds(head_dims, any(layer.softcap for layer in layers), dtype, kv_dtype))
