"""Tiny random checkpoints of encoder-only models, made by transformers, and a runner for them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    ModernBertConfig,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, Input, OutputRows
from pagoda.models.base import TOKEN_TYPES
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import moved

CPU = torch.device("cpu")
VOCAB = 131
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 320,
    "pad_token_id": 3,
}


def _modernbert(**more: object) -> PretrainedConfig:
    special = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertConfig(**{**_SHAPE, **special, "local_attention": 12, "classifier_activation": "silu", **more})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: BertConfig(**_SHAPE),
    "bert-gelu-tanh": lambda: BertConfig(**{**_SHAPE, "num_attention_heads": 6}, hidden_act="gelu_new"),
    "bert-relu": lambda: BertConfig(**_SHAPE, hidden_act="relu", type_vocab_size=3),
    "roberta": lambda: RobertaConfig(**_SHAPE, type_vocab_size=1),
    "xlm-roberta": lambda: XLMRobertaConfig(**{**_SHAPE, "pad_token_id": 1}, type_vocab_size=1),
    "modernbert": _modernbert,
    "modernbert-biased": lambda: _modernbert(
        norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, classifier_pooling="mean",
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
}  # fmt: skip
HEADS = {
    "": AutoModel,
    "mlm": AutoModelForMaskedLM,
    "classifier": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def make_encoder(name: str, head: str = "", num_labels: int = 3) -> PreTrainedModel:
    """A model in float32 whose every parameter, norms and biases included, is random and matters.

    head: a key of HEADS.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]()
    if head in ("classifier", "tokens"):
        config.num_labels = num_labels
    model = HEADS[head].from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0, 0.3)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def save_encoder(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def texts(*lengths: int, seed: int = 3) -> list[list[int]]:
    """Random token ids, without those of padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def batch_of(
    rows: Sequence[Sequence[int]], num_token_types: int = 0, types: Sequence[Sequence[int]] | None = None,
    index: Sequence[int] | None = None,
) -> ForwardBatch:  # fmt: skip
    """All tokens of some texts, one text after the other.

    types: of each token, zeros by default.   index: the tokens whose final states are wanted, by default all.
    """
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    num_tokens, longest = int(starts[-1]), int(lengths.max())
    blocks, slots = torch.empty(len(rows), 0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    metadata = AttentionMetadata(starts, lengths, blocks, slots, 16, longest, longest)
    output_index = torch.arange(num_tokens) if index is None else torch.tensor(index)
    inputs = {}
    if num_token_types:
        flat = [kind for row in types for kind in row] if types is not None else [0] * num_tokens
        inputs[TOKEN_TYPES] = Input(torch.tensor(flat, dtype=torch.int32))
    return ForwardBatch(
        token_ids=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        positions=torch.cat([torch.arange(len(row)) for row in rows]).int(),
        metadata=(metadata,),
        outputs=OutputRows(output_index, (metadata,)),
        logits_index=torch.arange(len(output_index)),
        inputs=inputs,
    )


def states(
    model: ForwardRunner, rows: Sequence[Sequence[int]], device: torch.device = CPU, **more: object
) -> list[torch.Tensor]:
    """The final hidden states of each text, computed in one batch.

    device: where the model is; results are on the CPU.   more: of `batch_of`.
    """
    batch = batch_of(rows, model.model.num_token_types, **more)  # type: ignore[arg-type]
    return list(model.run(moved(batch, device), []).hidden.cpu().split([len(row) for row in rows]))
