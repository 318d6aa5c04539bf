"""Classification heads made from rows of a decoder's output head: models that answer "yes" or "no"."""

from dataclasses import dataclass

from pagoda.base.errors import ConfigError
from pagoda.base.hf_overrides import PLAIN, TWO_WAY
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.layers.parameter import PickedRows
from pagoda.models.config_reader import ConfigReader
from pagoda.models.decoder_config import DecoderConfig

TOKEN_IDS = "classifier_token_ids"
"""Setting in which loading puts the ids of `classifier_from_token`."""

# The prompt of https://huggingface.co/Qwen/Qwen3-Reranker-0.6B. All of it is in expressions: a template's own newlines
# may be trimmed.
QWEN3_RERANKER = (
    "{{ '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: \' }}'
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    "default('Given a web search query, retrieve relevant passages that answer the query') }}"
    "{{ '\n<Query>: ' }}{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "{{ '\n<Document>: ' }}{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "{{ '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)


@dataclass(frozen=True, slots=True)
class TokenHead:
    """A head made from rows of the output head.   plan: its pooling and labels."""

    rows: PickedRows
    plan: PoolingPlan


def read_token_head(config: ConfigReader, decoder: DecoderConfig) -> TokenHead | None:
    """Return the head that `classifier_from_token` asks for; None without it. Raises ConfigError."""
    tokens, token_ids = config.texts("classifier_from_token"), config.ids(TOKEN_IDS)
    is_reranker = config.flag("is_original_qwen3_reranker", False)
    if not tokens:
        if is_reranker:
            raise ConfigError(f"{config.origin}: is_original_qwen3_reranker needs classifier_from_token: ['no', 'yes']")
        return None
    method = TWO_WAY if is_reranker else config.choice("method", (TWO_WAY, PLAIN), PLAIN)
    if method == TWO_WAY and len(tokens) != 2:
        raise ConfigError(
            f"{config.origin}: classifier_from_token has {len(tokens)} tokens; {TWO_WAY} takes two, such as "
            "['no', 'yes']"
        )
    if decoder.logit_softcap:
        raise ConfigError(f"{config.origin}: classifier_from_token is not supported with final_logit_softcapping")
    path = "model.embed_tokens.weight" if decoder.spec.tie_embeddings else "lm_head.weight"
    vocab_size = decoder.spec.vocab_size
    template = QWEN3_RERANKER if is_reranker else ""
    if method == TWO_WAY:
        # softmax([a, b])[1] is sigmoid(b - a)
        rows, labels = PickedRows(path, vocab_size, token_ids[1:], token_ids[:1]), tokens[1:]
    else:
        rows, labels = PickedRows(path, vocab_size, token_ids), tokens
    plan = PoolingPlan(
        PoolingKind.LAST,
        normalize=False,
        embeds=False,
        labels=labels,
        label_activation="sigmoid" if len(labels) == 1 else "softmax",
        score_template=template,
    )
    return TokenHead(rows, plan)
