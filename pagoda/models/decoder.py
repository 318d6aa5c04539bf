"""Decoder: the forward pass of every architecture in this folder, driven by its ArchConfig and its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.base.model_spec import ModelSpec
from pagoda.layers.attention import Attention
from pagoda.layers.mlp import GatedMLP
from pagoda.models.architecture import ArchConfig
from pagoda.models.kv_layout import group_layers
from pagoda.ops.batch import ForwardBatch, KVLayer
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import LinearWeight, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer. Norm weights are [hidden]; post norms (on a block's output) are None where there are none."""

    attention_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    mlp: GatedMLP
    post_mlp_norm: Tensor | None


class Decoder:
    """A decoder-only model (see `models.base.Model`): weights and the order of ops; no device, no cache.

    embedding: [vocab, hidden] in compute dtype.   final_norm: [hidden].   lm_head: [vocab, hidden].
    """

    def __init__(
        self,
        config: ArchConfig,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: LinearWeight,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.kv_groups = group_layers(config.spec.layer_windows)
        group_of = {layer: index for index, group in enumerate(self.kv_groups) for layer in group.layers}
        self._group_of_layer = tuple(group_of[layer] for layer in range(config.spec.num_layers))

    @property
    def spec(self) -> ModelSpec:
        return self.config.spec

    def forward(self, ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """See `models.base.Model`. Once all K and V are written, the last layer goes on with the tail alone."""
        eps, unit_offset = self.config.rms_norm_eps, self.config.unit_offset_norms
        residual = ops.embedding(batch.token_ids, self.embedding, self.config.embedding_scale)
        x = ops.rms_norm(residual, self.layers[0].attention_norm, eps, unit_offset)
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            group = self._group_of_layer[index]
            metadata = batch.metadata[group]
            q = layer.attention.queries(ops, x, batch.positions, kv[index], metadata)
            if layer is self.layers[-1]:
                metadata = batch.tail.metadata[group]
                q, residual = (ops.select_rows(rows, batch.tail.index) for rows in (q, residual))
            x = layer.attention.attend(ops, q, kv[index], metadata)
            if layer.post_attention_norm is not None:
                x = ops.rms_norm(x, layer.post_attention_norm, eps, unit_offset)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps, unit_offset)
            x = layer.mlp(ops, x)
            if layer.post_mlp_norm is not None:
                x = ops.rms_norm(x, layer.post_mlp_norm, eps, unit_offset)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps, unit_offset)
        return x

    def compute_logits(self, ops: ForwardOps, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32 [S, vocab], softcap included."""
        logits = ops.logits(hidden, self.lm_head)
        cap = self.config.logit_softcap
        return ops.softcap(logits, cap) if cap else logits
