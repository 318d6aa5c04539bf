"""Counts that are kept up to date against counting the whole history, over random steps, drafts and roll-backs."""

from collections import Counter

import numpy as np
import pytest

from pagoda.worker.constraints import TokenCounts


def counted_from_scratch(tokens: list[int], num_prompt: int, with_prompt: bool) -> dict[int, int]:
    """The definition: how often each penalized token is in the output."""
    output = Counter(tokens[num_prompt:])
    seen = tokens if with_prompt else tokens[num_prompt:]
    return {token: output[token] for token in seen}


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int, with_prompt: bool) -> None:
    rng = np.random.default_rng(seed)
    vocab, num_prompt = int(rng.choice([3, 40, 5000])), int(rng.integers(1, 30))
    row = np.zeros(400, np.int32)
    row[:num_prompt] = rng.integers(0, vocab, num_prompt)
    counts, known = TokenCounts(num_prompt, with_prompt), num_prompt
    for _ in range(60):
        # A verified row draws at its last position, then after each draft; then some drafts are accepted.
        drafts = int(rng.choice([0, 0, 1, 4]))
        row[known : known + drafts] = rng.integers(0, vocab, drafts)
        for position in range(known, known + drafts + 1):
            ids, times = counts.before(position, row, known)
            expected = counted_from_scratch(row[:position].tolist(), num_prompt, with_prompt)
            assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == expected
            assert len(ids) == len(set(ids.tolist()))
        accepted = int(rng.integers(0, drafts + 1))
        row[known + accepted] = rng.integers(0, vocab)
        known += accepted + 1
        if rng.random() < 0.1:  # the row continues from an earlier position, with other tokens
            known = int(rng.integers(num_prompt, known + 1))
            row[known:] = 0


@pytest.mark.parametrize("num_steps", [50, 500])
def test_a_step_counts_its_new_token_alone(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the history: no step but the first looks at more than one token."""
    row = np.arange(2000, dtype=np.int32) % 700
    looked_at: list[int] = []
    single, all_at_once = TokenCounts._count, TokenCounts._count_all

    def count(self: TokenCounts, token: int, in_output: bool) -> None:
        looked_at.append(1)
        single(self, token, in_output)

    def count_all(self: TokenCounts, token_ids: np.ndarray) -> None:
        looked_at.append(len(token_ids))
        all_at_once(self, token_ids)

    monkeypatch.setattr(TokenCounts, "_count", count)
    monkeypatch.setattr(TokenCounts, "_count_all", count_all)
    counts = TokenCounts(1000)
    for position in range(1000, 1000 + num_steps):
        counts.before(position, row, position)
    assert looked_at == [1000] + [1] * (num_steps - 1)
