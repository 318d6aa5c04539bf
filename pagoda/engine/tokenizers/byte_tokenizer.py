"""ByteTokenizer: one token per byte. For tests, and to run an engine without a model's vocabulary."""

from collections.abc import Sequence

from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.tokenizers.token_length import TokenLengthBound
from pagoda.engine.tokenizers.tokenizer import TokenizerFacts

BOS, EOS = 256, 257
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is BOS and 257 is EOS; `encode` adds neither."""

    facts = TokenizerFacts(
        vocab_size=258,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
        special_token_ids=frozenset({BOS, EOS}),
        chat_template=ChatTemplate(_TEMPLATE),
        length_bound=TokenLengthBound(max_chars=1),
    )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_marked(
        self, text: str, add_special_tokens: bool = False, known: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        first, *others = map(self.encode, text.split(self.facts.marks.slot))
        for some, after in zip(known, others, strict=True):
            first += [*some, *after]
        return first

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in token_ids if not (skip_special_tokens and i >= BOS))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < BOS:
            return bytes([token_id])
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id, b"")

    def token_string(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")
