"""A row's logit constraints: bias, allowed and forbidden tokens, bad words, speech, and what penalties count."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.base.sampling_params import SamplingParams, SpeechRules

_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RowConstraints:
    """One row's logit constraints; rows without any have no RowConstraints.

    bias_ids: int32 [b], bias: float32 [b], added to those logits.   allowed: bool [highest allowed id + 1], the
        only allowed ids, or None.
    bad_words: token sequences that must not appear in the output, or None.
    min_tokens: while the output is shorter, `end_ids` (int32, EOS and stop tokens) are forbidden, unless the grammar
        allows nothing else.
    ngram_size: no sequence of so many tokens, of prompt and output, may occur twice; 0 is off.
    last_token: bool [its id + 1], the only token that may be number `max_tokens` of the output, or None.
    has_penalty: the presence, frequency or repetition penalty is not neutral.   speech: its rules, or None.
    """

    bias_ids: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None
    bad_words: "BadWords | None"
    min_tokens: int
    end_ids: np.ndarray
    has_penalty: bool
    ngram_size: int = 0
    max_tokens: int = 0
    last_token: np.ndarray | None = None
    speech: "SpeechConstraints | None" = None

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> "RowConstraints | None":
        """Return the constraints of `params`, or None if they do not change any logit."""
        has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        ends = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens > 0 else []
        # A grammar decides about ends itself.
        last = params.forced_eos_token_id if params.grammar is None else None
        if not (
            has_penalty
            or ends
            or params.logit_bias
            or params.bad_words_token_ids
            or params.allowed_token_ids is not None
            or params.no_repeat_ngram_size
            or last is not None
            or params.speech is not None
        ):
            return None
        return cls(
            bias_ids=np.array([token for token, _ in params.logit_bias], np.int32),
            bias=np.array([value for _, value in params.logit_bias], np.float32),
            allowed=None if params.allowed_token_ids is None else _mask_of(params.allowed_token_ids),
            bad_words=BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None,
            min_tokens=params.min_tokens,
            end_ids=np.array(ends, np.int32),
            has_penalty=has_penalty,
            ngram_size=params.no_repeat_ngram_size,
            max_tokens=params.max_tokens or 0,
            last_token=None if last is None else _mask_of((last,)),
            speech=SpeechConstraints(params.speech) if params.speech is not None else None,
        )

    @property
    def reads_output(self) -> bool:
        """Return whether they depend on the tokens of the output, and not on their number alone."""
        has_timestamps = self.speech is not None and self.speech.rules.first_timestamp is not None
        return self.has_penalty or self.bad_words is not None or self.ngram_size > 0 or has_timestamps

    def names(self, num_output: int) -> list[str]:
        """Return which parameters of the request may forbid the token after `num_output` tokens of output."""
        found = ["allowed_token_ids"] if self.allowed is not None else []
        found += ["bad_words"] if self.bad_words is not None else []
        found += ["no_repeat_ngram_size"] if self.ngram_size else []
        found += ["speech"] if self.speech is not None else []
        return [*found, f"min_tokens={self.min_tokens}"] if num_output < self.min_tokens else found

    def allowed_after(self, num_output: int, rule_bits: np.ndarray | None = None) -> np.ndarray | None:
        """Return a mask of the only ids that may follow `num_output` tokens of output, None for all.

        rule_bits: see `forbidden`.
        """
        return self.last_token if self._is_last(num_output, rule_bits) else self.allowed

    def forbidden(self, token_ids: np.ndarray, num_prompt: int, rule_bits: np.ndarray | None = None) -> np.ndarray:
        """Return the ids (int32) that must not follow these tokens, of which the first `num_prompt` are the prompt's:
        early end tokens, last tokens of bad words and of sequences that are there already.

        token_ids: as `TableMirror.known_tokens` gives them.
        rule_bits: what the row's output rule allows next, as in GrammarMasks; None if it has none.
        """
        output = token_ids[num_prompt:]
        if self._is_last(len(output), rule_bits):
            return _NO_IDS
        banned = self.bad_words.after(output) if self.bad_words is not None else []
        if len(output) < self.min_tokens and not _are_all(rule_bits, self.end_ids):
            banned = [*banned, self.end_ids]
        if self.ngram_size:
            banned = [*banned, ends_of_repeats(token_ids, self.ngram_size)]
        if self.speech is not None:
            banned = [*banned, self.speech.suppressed if len(output) else self.speech.suppressed_first]
        return np.concatenate(banned) if banned else _NO_IDS

    def _is_last(self, num_output: int, rule_bits: np.ndarray | None) -> bool:
        """Return whether the token after `num_output` tokens of output is one that is given, and no rule forbids."""
        if self.last_token is None or num_output + 1 != self.max_tokens:
            return False
        last = len(self.last_token) - 1
        return rule_bits is None or bool(int(rule_bits[last // 32]) >> last % 32 & 1)


def _are_all(bits: np.ndarray | None, token_ids: np.ndarray) -> bool:
    """Return whether the bits of a mask, int32 [ceil(vocab / 32)], are set for some of the tokens and for no others."""
    if bits is None:
        return False
    others = bits.view(np.uint32).copy()
    np.bitwise_and.at(others, token_ids // 32, ~(np.uint32(1) << (token_ids % 32).astype(np.uint32)))
    return not others.any()


def ends_of_repeats(token_ids: np.ndarray, size: int) -> np.ndarray:
    """Return the ids (int32) with which the last tokens would become a sequence of `size` tokens that is there already.

    token_ids: int32 [n]; a negative number is no token.
    """
    num_sequences = max(len(token_ids) - size + 1, 0)
    is_repeated = np.ones(num_sequences, np.bool_)
    for at in range(size - 1 if num_sequences else 0):
        is_repeated &= token_ids[at : at + num_sequences] == token_ids[num_sequences + at]
    found = np.unique(token_ids[size - 1 :][is_repeated])
    return found[found >= 0]


class SpeechConstraints:
    """SpeechRules as the sampler applies them.

    suppressed, suppressed_first: int32, forbidden in every place, and in the first one. Distinct, in ascending order.
    """

    def __init__(self, rules: SpeechRules) -> None:
        self.rules = rules
        never = {*rules.suppressed}
        if rules.first_timestamp is not None:
            never.add(rules.first_timestamp - 1)  # the token that asks for none
        self.suppressed = np.array(sorted(never), np.int32)
        self.suppressed_first = np.array(sorted({*never, *rules.suppressed_first}), np.int32)

    def forbidden_ranges(self, output_token_ids: np.ndarray, vocab_size: int) -> list[tuple[int, int]]:
        """Return the ids (from, to) that the order of timestamps forbids after this output."""
        first, rules = self.rules.first_timestamp, self.rules
        assert first is not None
        if not len(output_token_ids):
            return [(0, first), (first + rules.max_first_step + 1, vocab_size)]
        is_timestamp = output_token_ids >= first
        follows, is_pair = bool(is_timestamp[-1]), len(output_token_ids) < 2 or bool(is_timestamp[-2])
        if follows and is_pair:
            return [(first, vocab_size)]
        at = np.flatnonzero(is_timestamp)
        least = int(output_token_ids[at[-1]]) + (not follows) if len(at) else first
        return [(0, rules.end_id), (first, least)] if follows else [(first, least)]


def _mask_of(token_ids: Sequence[int]) -> np.ndarray:
    mask = np.zeros(max(token_ids) + 1, np.bool_)
    mask[list(token_ids)] = True
    return mask


class BadWords:
    """Finds the ids that would complete a bad word, with a trie of the reversed words without their last ids.

    Each step walks back only as far as the output matches some word, so its cost is independent of the number of words.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: sequences of ids, none of them empty."""
        self._children: dict[tuple[int, int], int] = {}
        ends: dict[int, set[int]] = {}
        num_nodes = 1
        for word in words:
            node = 0
            for token in word[-2::-1]:
                child = self._children.setdefault((node, token), num_nodes)
                num_nodes += child == num_nodes
                node = child
            ends.setdefault(node, set()).add(word[-1])
        self._ends = {node: np.array(sorted(ids), np.int32) for node, ids in ends.items()}

    def after(self, output_token_ids: np.ndarray) -> list[np.ndarray]:
        """Return int32 arrays of the ids that must not follow this output."""
        node, at = 0, len(output_token_ids)
        found = [self._ends[0]] if 0 in self._ends else []
        while at:
            at -= 1
            child = self._children.get((node, int(output_token_ids[at])))
            if child is None:
                break
            node = child
            if node in self._ends:
                found.append(self._ends[node])
        return found


_FEW = 8  # up to this many new tokens are counted one by one; more (a new row) by sorting


class TokenCounts:
    """The distinct tokens of a row's history, and how often each is in its output.

    Only tokens that the worker knows to be final are kept; drafts of the current step are counted for that step alone,
    so there is nothing to undo when they are rejected. If a row continues from an earlier position, it is counted anew.
    """

    def __init__(self, num_prompt: int, with_prompt: bool = True) -> None:
        """with_prompt: tokens of the prompt are penalized too."""
        self._num_prompt = num_prompt
        self._begin = 0 if with_prompt else num_prompt
        self._start_over()

    def _start_over(self) -> None:
        self._end = self._begin  # tokens before this position are counted
        self._index: dict[int, int] = {}
        self._ids = np.empty(0, np.int32)
        self._counts = np.empty(0, np.int32)

    def before(self, position: int, token_ids: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens before `position` and their counts in the output, both int32.

        token_ids: int32 [position or more], the row's tokens, as `TableMirror.known_tokens` gives them.
        num_tokens: how many of them are known; what follows are drafts.
        The arrays are valid until the next call.
        """
        end = min(position, num_tokens)
        if end < self._end:
            self._start_over()
        if end - self._end > _FEW:
            self._count_all(token_ids[:end])
        else:
            for at in range(self._end, end):
                if (token := int(token_ids[at])) >= 0:
                    self._count(token, at >= self._num_prompt)
        self._end = max(self._end, end)
        used = len(self._index)
        ids, counts = self._ids[:used], self._counts[:used]
        return (ids, counts) if position <= end else _with_drafts(ids, counts, token_ids[end:position])

    def _count(self, token: int, in_output: bool) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            room = max(16, 2 * index)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int32)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.int32)])
        self._ids[index] = token
        self._counts[index] += in_output

    def _count_all(self, token_ids: np.ndarray) -> None:
        ids = np.unique(token_ids[self._begin :])
        ids = ids[ids >= 0]
        self._counts = np.zeros(len(ids), np.int32)
        used, counts = np.unique(token_ids[self._num_prompt :], return_counts=True)
        self._counts[np.searchsorted(ids, used)] = counts
        self._ids = ids.astype(np.int32)
        self._index = dict(zip(ids.tolist(), range(len(ids)), strict=True))


def _with_drafts(ids: np.ndarray, counts: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return copies to which the drafts are added. They are output: only a whole prompt is followed by drafts."""
    both = np.concatenate([ids, drafts])
    distinct, where = np.unique(both, return_inverse=True)
    total = np.zeros(len(distinct), np.int32)
    np.add.at(total, where, np.concatenate([counts, np.ones(len(drafts), np.int32)]))
    return distinct, total
