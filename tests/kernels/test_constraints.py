"""Logit constraints of a batch: the torch and native versions against the definition, bit for bit."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.ops import Ops
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.sampling.batch import BatchConstraints, TokenLists


def random_ids(rng: np.random.Generator, vocab: int, most: int) -> np.ndarray:
    """Distinct ids, often none."""
    size = int(rng.choice([0, 0, 1, min(most, vocab), rng.integers(0, min(most, vocab) + 1)]))
    return rng.choice(vocab, size, replace=False).astype(np.int32)


def random_constraints(rng: np.random.Generator, num_rows: int, vocab: int) -> BatchConstraints:
    rows = np.flatnonzero(rng.random(num_rows) < 0.8)
    m = len(rows)
    bias, penalized, forbidden = (
        TokenLists.of([random_ids(rng, vocab, most) for _ in range(m)]) for most in (9, 300, 20)
    )
    allowed = [rng.random(rng.integers(0, vocab + 1)) < 0.5 if rng.random() < 0.4 else None for _ in range(m)]
    return BatchConstraints(
        rows,
        bias,
        rng.choice([-100.0, -0.5, 1e-3, 100.0], len(bias.ids)).astype(np.float32),
        penalized,
        rng.integers(0, 5, len(penalized.ids)).astype(np.int32),
        rng.choice([1.0, 1.1, 0.7, 3.0], m).astype(np.float32),
        rng.choice([0.0, 0.3, -2.0], m).astype(np.float32),
        rng.choice([0.0, 1.9, -0.1], m).astype(np.float32),
        allowed,
        forbidden,
    )


@pytest.mark.parametrize("vocab", [1, 17, 1000])
@pytest.mark.parametrize("seed", range(12))
def test_a_batch_of_every_combination(fast: Ops, reference: ReferenceOps, vocab: int, seed: int) -> None:
    rng = np.random.default_rng([seed, vocab])
    constraints = random_constraints(rng, 12, vocab)
    logits = torch.from_numpy(rng.normal(0, 4, (12, vocab)).astype(np.float32))
    if vocab > 1:
        logits[3, vocab // 2], logits[4, 0], logits[5, 1] = torch.inf, -torch.inf, torch.nan
    logits[6, 0] = 0.0
    expected = logits.clone()
    reference.constrain(expected, constraints)
    padded = torch.full((12, vocab + 3), 7.0)  # rows that do not follow each other without gaps
    padded[:, :vocab] = logits
    fast.constrain(padded[:, :vocab], constraints)
    assert torch.equal(padded[:, :vocab].nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))
    assert (padded[:, vocab:] == 7.0).all()
    untouched = np.setdiff1d(np.arange(12), constraints.rows)
    assert expected[untouched].nan_to_num().equal(logits[untouched].nan_to_num())


@pytest.mark.parametrize("name", ["bias", "penalized", "forbidden"])
@pytest.mark.parametrize("bad", [-1, 17, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(fast: Ops, reference: ReferenceOps, name: str, bad: int) -> None:
    lists = {key: [] if key != name else [3, bad] for key in ("bias", "penalized", "forbidden")}
    for ops in (fast, reference):
        with pytest.raises(InvariantBroken, match=f"constrain: {name}: element 1 is {bad}, allowed are 0 to 16"):
            ops.constrain(torch.zeros(2, 17), of_one_row(**lists))


def test_rows_and_masks_outside_the_logits_are_refused(fast: Ops, reference: ReferenceOps) -> None:
    for ops in (fast, reference):
        with pytest.raises(InvariantBroken, match="constrain: allowed: element 0 is 17, allowed are 0 to 16"):
            ops.constrain(torch.zeros(2, 17), of_one_row(allowed=np.ones(18, np.bool_)))
        with pytest.raises(InvariantBroken, match="constrain: rows: element 0 is 2, allowed are 0 to 1"):
            ops.constrain(torch.zeros(2, 17), of_one_row(row=2))


def of_one_row(
    row: int = 0,
    bias: Sequence[int] = (),
    penalized: Sequence[int] = (),
    forbidden: Sequence[int] = (),
    allowed: np.ndarray | None = None,
) -> BatchConstraints:
    one = np.ones(1, np.float32)
    return BatchConstraints(
        np.array([row]),
        TokenLists.of([np.array(bias, np.int32)]),
        np.ones(len(bias), np.float32),
        TokenLists.of([np.array(penalized, np.int32)]),
        np.ones(len(penalized), np.int32),
        one,
        one,
        one,
        [allowed],
        TokenLists.of([np.array(forbidden, np.int32)]),
    )
