"""Names of blocks: equal exactly where prefix, adapter, salt and media are equal."""

import numpy as np
import pytest

from pagoda.base.clock import VirtualClock
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import EventStream
from pagoda.core.kv import KVGroupSpec, KVSizing
from pagoda.core.kv.block_pool import BlockPools
from pagoda.core.kv.prefix_cache import HashChain, PrefixCache, _seed_bytes, hashes_of_prompt, make_root
from pagoda.core.request import LoraRef, MediaItem, Request
from pagoda.core.request_table import RequestTable
from pagoda.core.scheduler_options import SchedulerOptions

SEED = b"seed"


def make_cache(seed: int | None = 0, pool: BlockPools | None = None) -> PrefixCache:
    table = RequestTable(2, 16, track_in_flight=False, expect_tokens=False)
    sizing = KVSizing.of((KVGroupSpec(),), 4, 16, SchedulerOptions())
    stream = EventStream(VirtualClock())
    return PrefixCache(
        table,
        [np.zeros((2, 4), np.int32)],
        pool or BlockPools((16,)),
        sizing,
        stream,
        enabled=True,
        seed=seed,
    )


def hashes(
    tokens: list[int], *, lora: LoraRef | None = None, salt: str | None = None, media: tuple[MediaItem, ...] = ()
):
    chain = HashChain(make_root(SEED, lora, salt), 4, media)
    chain.extend(np.array(tokens, np.int32), len(tokens))
    return chain.hashes


def test_only_full_blocks_are_hashed() -> None:
    assert len(hashes(list(range(13)))) == 3


def test_hashes_in_pieces_equal_hashes_at_once() -> None:
    tokens = np.arange(40, dtype=np.int32)
    media = (MediaItem("x", 6, 3), MediaItem("y", 20, 1))
    for items in ((), media):
        pieces = HashChain(make_root(SEED, None, None), 4, items)
        for known in (3, 4, 9, 22, 23, 40):
            pieces.extend(tokens, known)
        assert pieces.hashes == hashes(tokens.tolist(), media=items)


def test_a_hash_covers_the_whole_prefix() -> None:
    one, other = hashes([*range(8), 1, 2, 3, 4]), hashes([*range(4), 9, 9, 9, 9, 1, 2, 3, 4])
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2]


def test_adapter_path_and_salt_separate() -> None:
    tokens = list(range(4))
    seen = {
        hashes(tokens, lora=lora, salt=salt)[0]
        for lora in (None, LoraRef("a"), LoraRef("a", "/elsewhere"), LoraRef("b"))
        for salt in (None, "", "s")
    }
    assert len(seen) == 12


def test_media_separate_from_the_block_they_touch_on() -> None:
    tokens = list(range(16))
    plain, one = hashes(tokens), hashes(tokens, media=(MediaItem("x", 5, 2),))
    assert plain[0] == one[0]
    assert all(a != b for a, b in zip(plain[1:], one[1:], strict=True))
    assert hashes(tokens, media=(MediaItem("x", 5, 2),)) == one
    assert hashes(tokens, media=(MediaItem("x", 6, 2),))[1] != one[1]
    assert hashes(tokens, media=(MediaItem("y", 5, 2),))[1] != one[1]


def test_a_fork_has_hashes_of_its_own() -> None:
    chain = HashChain(make_root(SEED, None, None), 4)
    tokens = np.arange(8, dtype=np.int32)
    chain.extend(tokens, 4)
    twin = chain.fork()
    chain.extend(tokens, 8)
    twin.extend(np.array([0, 1, 2, 3, 9, 9, 9, 9], np.int32), 8)
    assert chain.hashes[0] == twin.hashes[0]
    assert chain.hashes[1] != twin.hashes[1]


def test_of_equal_blocks_the_first_is_found_until_it_is_evicted() -> None:
    pool = BlockPools((16,))
    cache = make_cache(pool=pool)
    cache.insert(0, [b"a", b"b"], [1, 2])
    cache.insert(0, [b"a", b"b"], [3, 0])
    assert cache.longest_cached_prefix(0, [b"a", b"b", b"c"]) == [1, 2]
    cache.remove([1])
    assert cache.longest_cached_prefix(0, [b"a", b"b"]) == [3, 2]
    cache.remove([3])
    assert cache.longest_cached_prefix(0, [b"a", b"b"]) == []
    cache.check()
    assert pool.has_content.nonzero()[0].tolist() == [1, 2, 3]


def test_a_window_takes_the_last_run_that_is_long_enough() -> None:
    cache = make_cache()
    keys = [bytes([number]) for number in range(6)]
    cache.insert(0, [keys[0], keys[2], keys[3], keys[5]], [10, 12, 13, 15])
    assert cache.last_cached_run(0, keys, 2) == [0, 0, 12, 13]
    assert cache.last_cached_run(0, keys, 1) == [0, 0, 0, 0, 0, 15]
    assert cache.last_cached_run(0, keys, 3) == [10]
    assert cache.last_cached_run(0, keys[1:2], 1) == []


def test_a_chosen_seed_repeats_hashes_and_a_drawn_one_does_not() -> None:
    assert make_cache(seed=7).seed == make_cache(seed=7).seed
    assert make_cache(seed=None).seed != make_cache(seed=None).seed


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 63, 64, 65, 68, 69, 500])
def test_a_router_hashes_what_a_lookup_asks_for_and_little_more(num_tokens: int) -> None:
    """The chain of a cache has the same hashes, one block at a time."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    request = Request("a", tokens, SamplingParams(), cache_salt="salt")
    chain, expected = HashChain(make_root(_seed_bytes(7), None, "salt"), 4), list[bytes]()
    for end in range(4, num_tokens, 4):
        chain.extend(tokens, end)
        expected.append(chain.hashes[-1])
    assert list(hashes_of_prompt(request, 7, 4)) == expected
    if num_tokens == 500:
        hashed: list[int] = []
        extend = HashChain.extend
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(HashChain, "extend", lambda chain, _, end: (hashed.append(end), extend(chain, _, end)))
            assert next(hashes_of_prompt(request, 7, 4)) == expected[0]
        assert max(hashed) <= 64
