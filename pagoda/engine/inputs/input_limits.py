"""InputLimits: what one engine accepts, shared by all that prepare its requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.base.errors import RequestError
from pagoda.base.pooling import ModelTasks
from pagoda.base.request_limits import RequestLimits


@dataclass(frozen=True, slots=True)
class SpeechFacts:
    """What a speech model reads: windows of 30 s.   num_mels: of the spectrogram.   encoder_len: tokens of a window.

    settings: of its generation_config.json.
    """

    num_mels: int
    encoder_len: int
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """start: token ids with which an answer begins, the decoder's prompt.   max_tokens: of what the encoder reads."""

    start: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class InputLimits:
    """The limits of one engine's requests. Nothing but `fit` changes them.

    vocab_size: exclusive upper bound of token ids.   max_model_len: prompt plus output, in tokens.
    max_num_seqs: largest n.   of_request: bounds of the counts and sizes that callers control.
    tasks: what the model can be asked for.   embeds_size: elements of a prompt embedding; 0: prompts cannot be those.
    source: of an encoder-decoder model of text, whose encoder reads the prompts; None: its decoder reads them.
    alignment_heads: (layer, head) of the cross attention of a speech model whose tokens can be aligned, else ().
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int = 20
    of_request: RequestLimits = field(default_factory=RequestLimits)
    tasks: ModelTasks = field(default_factory=ModelTasks)
    embeds_size: int = 0
    source: SourceFacts | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def longest_prompt(self) -> int:
        """Return how many tokens a prompt may have, if nothing needs room after it."""
        return self.max_model_len if self.source is None else self.source.max_tokens

    def fit(self, max_model_len: int) -> None:
        """Set max_model_len to the engine's, which may be lower than the one given at construction."""
        self.max_model_len = max_model_len

    def check_ids(self, name: str, ids: tuple[int, ...]) -> None:
        """Raise RequestError, naming the parameter `name`, if a token id is outside the vocabulary."""
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"{name} has {token_id}, out of vocabulary (0 .. {self.vocab_size - 1})", name)
