"""Where a prompt begins to differ from an earlier one, and what the prefix cache could have had of it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, MediaItem, Request
from pagoda.metrics.known_tokens import KnownTokens
from pagoda.server.prefix_misses import PrefixMiss, explain_miss

A = tuple(range(100, 140))


def known(token_ids: tuple[int, ...], output: tuple[int, ...] = (), **fields: Any) -> KnownTokens:
    found = KnownTokens.of(Request("r", np.array(token_ids, np.int32), SamplingParams(), **fields), output)
    assert found is not None
    return found


def explain(tokens: KnownTokens, num_cached: int, *earlier: KnownTokens | None) -> PrefixMiss | None:
    named = [(f"r{number}", one) for number, one in enumerate(earlier)]
    return explain_miss(tokens, len(tokens.token_ids), num_cached, 4, named, lambda ids: "".join(map(chr, ids)))


def test_the_request_that_is_most_like_it_is_named() -> None:
    miss = explain(known(A), 8, known((1, 2)), None, known((*A[:7], 65)), known((*A[:9], 66, *A[10:])), known(A[:8]))
    assert miss is not None
    assert (miss.like, miss.position, miss.block) == ("r3", 9, 2)
    assert (miss.token_id, miss.token, miss.like_token_id, miss.like_token) == (109, "m", 66, "B")
    assert (miss.kind, miss.before) == ("differs", "defghijkl")
    assert miss.what == "it differs from r3 from token 9 on (block 2): 'm' here, 'B' there"


def test_all_that_can_be_cached_is_no_miss() -> None:
    assert explain(known(A), 36, known(A)) is None
    assert explain(known(A), 0) is None
    assert explain(known(A), 0, known((1,))) is None


@pytest.mark.parametrize(
    ("num_cached", "earlier", "what"),
    [
        (16, known(A[:10], A[10:20]), "it goes on where r0 ends, at token 20 (block 5)"),
        (4, known(A[:20]), "its first 20 tokens are those of r0, of which 4 were cached"),
        (0, known(A), "its first 40 tokens are those of r0, of which 0 were cached"),
    ],
)
def test_equal_tokens_that_were_not_cached_are_told_from_new_ones(
    num_cached: int, earlier: KnownTokens, what: str
) -> None:
    miss = explain(known(A), num_cached, earlier)
    assert miss is not None
    assert miss.what.startswith(what)


def test_requests_that_could_share_nothing_are_not_compared() -> None:
    adapter = LoraRef("a", digest="d")
    for fields in ({"cache_salt": "s"}, {"lora": adapter}):
        assert explain(known(A), 0, known(A, **fields)) is None
        assert explain(known(A, **fields), 0, known(A, **fields)) is not None
    embeds = Request("r", np.array(A, np.int32), SamplingParams(), prompt_embeds=np.zeros((4, 8), np.float32))
    assert KnownTokens.of(embeds, ()) is None
    assert KnownTokens.of(dataclasses.replace(embeds, prompt_embeds=None, encoder_len=5), ()) is None


def test_another_image_is_a_difference_though_its_tokens_are_equal() -> None:
    cat, dog = ((MediaItem(what, 8, 4),) for what in ("cat", "dog"))
    miss = explain(known(A, media=cat), 8, known(A, media=dog))
    assert miss is not None
    assert miss.what == "at token 8 (block 2) it has another image or sound than r0"
    assert explain(known(A, media=cat), 36, known(A, media=cat)) is None


def test_no_more_than_a_bound_is_kept() -> None:
    many = tuple(range(20_000))
    assert len(known(many, (1,)).token_ids) == 16_384
    assert len(known(A, many).token_ids) == 16_384
