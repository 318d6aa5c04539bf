"""RoBERTa and XLM-RoBERTa: a BERT whose positions start after the id of the padding token, with another head.

transformers gives padding tokens inside a text the position of the padding; here they have the one they are at.
"""

from pagoda.layers.linear import Linear
from pagoda.layers.module import Module
from pagoda.models.architecture import Architecture
from pagoda.models.bert import Bert, bert_namings
from pagoda.models.config_reader import ConfigReader
from pagoda.models.encoder_config import EncoderConfig, read_encoder
from pagoda.ops.forward import ForwardOps
from pagoda.ops.tensor import Tensor


class RobertaHead(Module):
    def __init__(self, hidden_size: int, num_labels: int) -> None:
        self.dense = Linear(hidden_size, hidden_size, bias=True)
        self.out_proj = Linear(hidden_size, num_labels, bias=True, quantizable=False)


class Roberta(Bert):
    def add_head(self, hidden_size: int, num_labels: int) -> None:
        self.classifier = RobertaHead(hidden_size, num_labels)

    def classify(self, ops: ForwardOps, pooled: Tensor) -> Tensor:
        head = self.classifier
        if not isinstance(head, RobertaHead):
            return super().classify(ops, pooled)
        return ops.logits(ops.tanh(head.dense(ops, pooled)), head.out_proj.weight.value)


def read(config: ConfigReader) -> EncoderConfig:
    padding = config.ids("pad_token_id")
    return read_encoder(config, "roberta", skipped_positions=(padding[0] if padding else 1) + 1)


ROBERTA = Architecture(
    name="roberta",
    hf_names=(
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "RobertaForTokenClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaForTokenClassification",
    ),
    model=Roberta,
    read=read,
    hf=bert_namings("roberta"),
    unused=r"(roberta\.)?pooler\.dense|lm_head\..+",
)
