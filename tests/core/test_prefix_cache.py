"""Names of blocks: equal exactly where prefix, adapter, salt and media are equal."""

import numpy as np

from pagoda.core.prefix_cache import HashChain, PrefixCache, make_root
from pagoda.core.request import LoraRef, MediaItem

SEED = b"seed"


def names(
    tokens: list[int], *, lora: LoraRef | None = None, salt: str | None = None, media: tuple[MediaItem, ...] = ()
):
    chain = HashChain(make_root(SEED, lora, salt), 4, media)
    chain.extend(np.array(tokens, np.int32), len(tokens))
    return chain.names


def test_only_full_blocks_are_named() -> None:
    assert len(names(list(range(13)))) == 3


def test_names_in_pieces_equal_names_at_once() -> None:
    tokens = np.arange(40, dtype=np.int32)
    media = (MediaItem("x", 6, 3), MediaItem("y", 20, 1))
    for items in ((), media):
        pieces = HashChain(make_root(SEED, None, None), 4, items)
        for known in (3, 4, 9, 22, 23, 40):
            pieces.extend(tokens, known)
        assert pieces.names == names(tokens.tolist(), media=items)


def test_a_name_covers_the_whole_prefix() -> None:
    one, other = names([*range(8), 1, 2, 3, 4]), names([*range(4), 9, 9, 9, 9, 1, 2, 3, 4])
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2]


def test_adapter_path_and_salt_separate() -> None:
    tokens = list(range(4))
    seen = {
        names(tokens, lora=lora, salt=salt)[0]
        for lora in (None, LoraRef("a"), LoraRef("a", "/elsewhere"), LoraRef("b"))
        for salt in (None, "", "s")
    }
    assert len(seen) == 12


def test_media_separate_from_the_block_they_touch_on() -> None:
    tokens = list(range(16))
    plain, one = names(tokens), names(tokens, media=(MediaItem("x", 5, 2),))
    assert plain[0] == one[0]
    assert all(a != b for a, b in zip(plain[1:], one[1:], strict=True))
    assert names(tokens, media=(MediaItem("x", 5, 2),)) == one
    assert names(tokens, media=(MediaItem("x", 6, 2),))[1] != one[1]
    assert names(tokens, media=(MediaItem("y", 5, 2),))[1] != one[1]


def test_a_fork_goes_its_own_way() -> None:
    chain = HashChain(make_root(SEED, None, None), 4)
    tokens = np.arange(8, dtype=np.int32)
    chain.extend(tokens, 4)
    twin = chain.fork()
    chain.extend(tokens, 8)
    twin.extend(np.array([0, 1, 2, 3, 9, 9, 9, 9], np.int32), 8)
    assert chain.names[0] == twin.names[0]
    assert chain.names[1] != twin.names[1]


def test_of_equal_blocks_the_first_is_found_until_it_goes() -> None:
    marked: list[int] = []
    cache = PrefixCache(1, 0, marked.extend)
    cache.register(0, [b"a", b"b"], [1, 2])
    cache.register(0, [b"a", b"b"], [3, 0])
    assert cache.first_misses(0, [b"a", b"b", b"c"]) == [1, 2]
    cache.forget([1])
    assert cache.first_misses(0, [b"a", b"b"]) == [3, 2]
    cache.forget([3])
    assert cache.first_misses(0, [b"a", b"b"]) == []
    cache.check()
    assert marked == [1, 2, 3]


def test_a_window_takes_the_last_run_that_is_long_enough() -> None:
    cache = PrefixCache(1, 0, lambda blocks: None)
    keys = [bytes([number]) for number in range(6)]
    cache.register(0, [keys[0], keys[2], keys[3], keys[5]], [10, 12, 13, 15])
    assert cache.last_run(0, keys, 2) == [0, 0, 12, 13]
    assert cache.last_run(0, keys, 1) == [0, 0, 0, 0, 0, 15]
    assert cache.last_run(0, keys, 3) == [10]
    assert cache.last_run(0, keys[1:2], 1) == []


def test_a_chosen_seed_repeats_names_and_a_drawn_one_does_not() -> None:
    def drop(blocks: object) -> None: ...

    assert PrefixCache(1, 7, drop).seed == PrefixCache(1, 7, drop).seed
    assert PrefixCache(1, None, drop).seed != PrefixCache(1, None, drop).seed
