"""Prompts as embeddings in an engine of this process: outputs, prefix cache, errors."""

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from pagoda import LLM, AsyncLLM, BeamSearchParams, PoolingParams, RequestError, SamplingParams
from pagoda.core.kv.prefix_cache import HashChain, make_root
from pagoda.core.request import MediaItem, PromptEmbeds
from pagoda.engine.async_text import AsyncText
from pagoda.engine.inputs import prompt_encoder
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.prompt_embeds import EncodedEmbeds, read_embeds
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from tests.device_under_test import DeviceUnderTest
from tests.engine.byte_llama import SMALL_ENGINE, write_byte_llama

OPTIONS: dict[str, Any] = {**SMALL_ENGINE, "dtype": "bfloat16"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(10, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def table(model: Path) -> torch.Tensor:
    return load_file(model / "model.safetensors")["model.embed_tokens.weight"].bfloat16()


@pytest.fixture(scope="module")
def llm(model: Path, on: DeviceUnderTest) -> Iterator[LLM]:
    with LLM(str(model), enable_prompt_embeds=True, **on.engine(OPTIONS)) as llm:
        yield llm


def hits(llm: LLM) -> int:
    return llm.llm_engine.core.make_stats().prefix_hits


def test_embeddings_of_tokens_give_the_output_of_the_tokens(llm: LLM, table: torch.Tensor) -> None:
    """In any type and shape that callers have, next to prompts of text and tokens, greedy and seeded."""
    params = [GREEDY, SamplingParams(max_tokens=9, seed=4, n=3, ignore_eos=True)]
    for asked in params:
        expected = llm.generate(PROMPT, asked)[0].outputs
        values = table[PROMPT]
        forms = [values, values.float(), values[None], values.float().numpy(), torch.nn.Parameter(values)]
        prompts: list[Any] = [{"prompt_embeds": form} for form in forms]
        outputs = llm.generate([*prompts, "a text", PROMPT, {"prompt_embeds": values, "prompt": "shown"}], asked)
        for output in (*outputs[:5], *outputs[6:]):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected]
        assert outputs[0].prompt_token_ids == [0] * len(PROMPT)
        assert (outputs[0].prompt, outputs[-1].prompt) == (None, "shown")
        assert outputs[6].prompt_token_ids == PROMPT


def test_streams_and_pooling(llm: LLM, table: torch.Tensor) -> None:
    given: Any = {"prompt_embeds": table[PROMPT]}
    deltas = list(llm.stream(given, GREEDY))
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == expected
    cut = PoolingParams(truncate_prompt_tokens=20)
    for params in (None, cut):
        pooled = [llm.embed(prompt, pooling_params=params)[0].outputs.embedding for prompt in (PROMPT, given)]
        assert pooled[0] == pooled[1]


def test_beams(llm: LLM, table: torch.Tensor, on: DeviceUnderTest) -> None:
    on.must_promise_bits()
    given: Any = {"prompt_embeds": table[PROMPT]}
    search = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    of_tokens, of_embeds = llm.beam_search([PROMPT, given], search)
    assert [one.cum_logprob for one in of_tokens.sequences] == [one.cum_logprob for one in of_embeds.sequences]
    assert [one.tokens[len(PROMPT) :] for one in of_tokens.sequences] == [one.tokens for one in of_embeds.sequences]


def test_embeddings_of_megabytes_are_decoded_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on meanwhile."""
    readers: list[int] = []

    def note(given: object, size: int, name: str) -> np.ndarray:
        readers.append(threading.get_ident())
        return read_embeds(given, size, name)

    monkeypatch.setattr(prompt_encoder, "read_embeds", note)
    values = torch.randn(2000, 576)
    data = base64.b64encode(save({"x": values})).decode()
    inputs = InputProcessor(ByteTokenizer(), InputLimits(258, 4096, 8, embeds_size=576), engine_seed=0)

    async def main() -> None:
        text = AsyncText(inputs)
        try:
            params = SamplingParams(max_tokens=1)
            request = await text.make_request({"prompt_embeds": EncodedEmbeds(data)}, params, "a", arrival_time_s=0.0)
        finally:
            text.close()
        assert request.prompt_embeds is not None
        assert np.array_equal(request.prompt_embeds.values, values.numpy())

    asyncio.run(main())
    assert len(readers) == 1
    assert readers[0] != threading.get_ident()


def test_async_llm(model: Path, table: torch.Tensor, on: DeviceUnderTest) -> None:
    async def main() -> None:
        async with AsyncLLM(str(model), enable_prompt_embeds=True, **on.engine(OPTIONS)) as llm:
            found = []
            for prompt in (PROMPT, {"prompt_embeds": table[PROMPT].float().numpy()}):
                outputs = [output async for output in llm.generate(prompt, GREEDY)]  # type: ignore[arg-type]
                found.append(outputs[-1].outputs[0].token_ids)
            assert found[0] == found[1]
            with pytest.raises(RequestError, match="not finite"):
                async for _ in llm.generate({"prompt_embeds": np.full((3, 192), np.nan, np.float32)}, GREEDY):
                    pass

    asyncio.run(main())


def test_only_equal_embeddings_share_blocks(llm: LLM, table: torch.Tensor) -> None:
    values = table[PROMPT].float().numpy()
    llm.generate({"prompt_embeds": values + 1}, GREEDY)
    before = hits(llm)
    llm.generate([0] * len(PROMPT), GREEDY)  # the placeholders of embeddings
    llm.generate({"prompt_embeds": np.concatenate([values[:1], values[1:] + 1])}, GREEDY)
    assert hits(llm) == before
    changed = values + 1
    changed[33] += 1  # in the fifth block
    llm.generate({"prompt_embeds": changed}, GREEDY)
    assert hits(llm) == before + 32
    again = llm.generate({"prompt_embeds": (values + 1).astype(np.float32)}, GREEDY)[0]
    assert again.num_cached_tokens == 48
    assert hits(llm) == before + 80


def test_block_hashes() -> None:
    rng = np.random.default_rng(1)
    embeds = rng.normal(size=(11, 3)).astype(np.float32)
    tokens = rng.integers(3, 90, 20).astype(np.int32)
    tokens[:11] = 0

    def hashes(given: np.ndarray | None, ids: np.ndarray = tokens, **more: Any) -> list[bytes]:
        placed = None if given is None else PromptEmbeds.of_first(given)
        chain = HashChain(make_root(b"", None, None), 4, embeds=placed, **more)
        for end in (3, 4, 9, 20):
            chain.extend(ids, end)
        return chain.hashes

    whole = hashes(embeds)
    assert len(set(whole)) == 5
    assert hashes(embeds.copy()) == whole
    assert not set(whole) & set(hashes(None))
    assert hashes(embeds[:8])[:2] == whole[:2]  # further embeddings leave earlier blocks alone
    assert not set(hashes(embeds[:8])[2:]) & set(whole)
    changed = embeds.copy()
    changed[10, 2] = np.nextafter(changed[10, 2], np.float32(9))
    assert hashes(changed)[:2] == whole[:2]
    assert not set(hashes(changed)[2:]) & set(whole)
    other = tokens.copy()
    other[11] += 1
    assert not set(hashes(embeds, other)[2:]) & set(whole)
    item = MediaItem("image", 2, 3)
    with_media = hashes(embeds, media=(item,))
    assert not set(with_media) & {*whole, *hashes(None, media=(item,))}
    flat = embeds[:8].reshape(2, 12)
    assert hashes(flat)[0] != whole[0]  # the same bytes in fewer positions

    def placed(*positions: int) -> list[bytes]:
        chain = HashChain(make_root(b"", None, None), 4, embeds=PromptEmbeds(np.array(positions, np.int32), embeds[:2]))
        chain.extend(np.zeros(20, np.int32), 20)
        return chain.hashes

    apart = placed(5, 10)
    assert apart[0] == hashes(None, np.zeros(20, np.int32))[0]  # before the first, as without
    assert len({*apart[1:], *placed(6, 10)[1:], *placed(5, 9)[2:]}) == 4 + 4 + 3
    assert placed(5, 9)[:2] == apart[:2]


def test_truncation_keeps_the_end(llm: LLM, table: torch.Tensor) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, truncate_prompt_tokens=21)
    outputs = llm.generate([PROMPT, {"prompt_embeds": table[PROMPT]}], params)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert len(outputs[1].prompt_token_ids or ()) == 21


def test_penalties_count_only_tokens_that_exist(llm: LLM, table: torch.Tensor) -> None:
    """A repetition penalty does not know the prompt, but counts the output."""
    loops = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3)
    of_embeds = llm.generate({"prompt_embeds": table[PROMPT]}, loops)[0].outputs[0].token_ids
    plain = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0].token_ids
    assert of_embeds[0] == plain[0], "nothing is penalized yet"
    assert of_embeds != plain
    # Token 0, the embeddings' placeholder, is the best until it was generated.
    two: Any = {0: 100.0, 5: 80.0}
    favoured = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logit_bias=two, repetition_penalty=2.0)
    assert llm.generate({"prompt_embeds": table[PROMPT]}, favoured)[0].outputs[0].token_ids == [0, 5]


CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
CONVERSATION = "<system>Be brief.\n<user>abc\nwhich of\nthem?\n<assistant>"


def as_parts(one: Any, two: Any) -> list[dict[str, Any]]:
    """Return messages that CHAT_TEMPLATE writes as CONVERSATION, with embeddings for `one` and `two`."""
    text = [{"type": "text", "text": "which of"}]
    parts = [{"type": "prompt_embeds", "data": one}, *text, {"type": "prompt_embeds", "data": two}]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]


def ids_of(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]  # there are three special tokens


def of_text(table: torch.Tensor, text: str) -> torch.Tensor:
    return table[ids_of(text)]


PLACEHOLDERS = [0 if at in {*range(24, 27), *range(37, 42)} else one for at, one in enumerate(ids_of(CONVERSATION))]


def as_base64(values: torch.Tensor) -> str:
    return base64.b64encode(save({"x": values.contiguous()})).decode()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=9, seed=4, n=3, ignore_eos=True)])
def test_parts_of_messages(llm: LLM, table: torch.Tensor, params: SamplingParams) -> None:
    """Several among texts, as arrays and base64, give what the same prompt gives as tokens, and as embeddings whole."""
    one, two = of_text(table, "abc"), of_text(table, "them?")
    options: Any = {"chat_template": CHAT_TEMPLATE}
    expected = llm.generate(ids_of(CONVERSATION), params)[0].outputs
    whole = llm.generate({"prompt_embeds": of_text(table, CONVERSATION)}, params)[0].outputs
    for given in ((one, two), (one.float().numpy(), as_base64(two))):
        messages = as_parts(*given)
        answer = llm.chat(messages, params, **options)[0]
        for outputs in (answer.outputs, whole):
            assert [found.token_ids for found in outputs] == [found.token_ids for found in expected]
        assert answer.prompt_token_ids == PLACEHOLDERS
        assert answer.prompt == CONVERSATION.replace("abc", "").replace("them?", "")
    found = list(llm.stream_chat(as_parts(one, two), params, **options))
    tokens = [token for delta in found for output in delta.outputs if not output.index for token in output.token_ids]
    assert tokens == expected[0].token_ids


def test_parts_share_blocks_with_equal_prompts_only(llm: LLM, table: torch.Tensor) -> None:
    one, two = of_text(table, "abc"), of_text(table, "them?")
    other = one.clone()
    other[1, 7] += 1
    options: Any = {"chat_template": CHAT_TEMPLATE, "cache_salt": "parts"}

    def cached(*given: torch.Tensor) -> int | None:
        return llm.chat(as_parts(*given), GREEDY, **options)[0].num_cached_tokens

    assert cached(one, two) == 0
    assert cached(other, two) == 24  # up to the block that has the first embedding
    assert cached(one, two[:2]) == 32
    assert cached(one, two) == 48
    assert llm.generate(PLACEHOLDERS, GREEDY, cache_salt="parts")[0].num_cached_tokens == 24


def test_penalties_and_truncation_of_parts(llm: LLM, table: torch.Tensor) -> None:
    """Penalties count the tokens around embeddings, and no placeholder."""
    one, two = of_text(table, "abc"), of_text(table, "them?")
    options: Any = {"chat_template": CHAT_TEMPLATE}
    bias: Any = {0: 90.0, ids_of("w")[0]: 100.0, ids_of("5")[0]: 60.0}
    favoured = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logit_bias=bias, repetition_penalty=2.0)
    found = llm.chat(as_parts(one, two), favoured, **options)[0].outputs[0].token_ids
    assert found == [0, *ids_of("5")]  # "w" is in the prompt, 0 only in the output
    for cut in (14, 30):
        for side in ("left", "right"):
            params = SamplingParams(
                temperature=0, max_tokens=5, ignore_eos=True, truncate_prompt_tokens=cut, truncation_side=side
            )
            expected = llm.generate(ids_of(CONVERSATION), params)[0].outputs[0].token_ids
            assert llm.chat(as_parts(one, two), params, **options)[0].outputs[0].token_ids == expected


def test_parts_are_refused_by_name(llm: LLM, model: Path, table: torch.Tensor, on: DeviceUnderTest) -> None:
    one, options = of_text(table, "abc"), {"chat_template": CHAT_TEMPLATE}
    bad: list[tuple[Any, str]] = [
        (None, "the part has no data"),
        ("%%", "not valid base64"),
        (7, "is 'int', expected a numpy array or a torch tensor; over HTTP, a file as base64"),
        (torch.zeros(2, 5), "expected .number of tokens, 192."),
        (one * float("nan"), "not finite"),
    ]
    for data, message in bad:
        with pytest.raises(RequestError, match=message) as caught:
            llm.chat(as_parts(one, data), GREEDY, **options)  # type: ignore[arg-type]
        assert caught.value.param == "messages[1].content[2]"
    systems = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    for template, count in ((systems, 0), ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", 2)):
        with pytest.raises(RequestError, match=f"the chat template writes it {count} times"):
            llm.chat(as_parts(one, one), GREEDY, chat_template=template)
    with pytest.raises(RequestError, match="context length is 128 tokens"):
        llm.chat(as_parts(one, torch.zeros(99, 192)), GREEDY, **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt_logprobs: the prompt, or a prompt adapter, has embeddings"):
        llm.chat(as_parts(one, one), SamplingParams(prompt_logprobs=1), **options)  # type: ignore[arg-type]
    with LLM(str(model), **on.engine(OPTIONS)) as off, pytest.raises(RequestError, match="set enable_prompt_embeds"):
        off.chat(as_parts(one, one), GREEDY, **options)  # type: ignore[arg-type]


BAD: dict[str, tuple[Any, str]] = {
    "list": ([[1.0, 2.0]], "expected a numpy array or a torch tensor"),
    "double": (np.zeros((2, 192)), "elements are 'float64'; convert them to float32"),
    "integers": (np.zeros((2, 192), np.int32), "elements are 'int32'"),
    "hidden size": (np.zeros((2, 191), np.float32), r"expected \(number of tokens, 192\)"),
    "one dimension": (np.zeros(192, np.float32), r"shape is \(192,\)"),
    "batch of two": (np.zeros((2, 3, 192), np.float32), "one prompt"),
    "empty": (np.zeros((0, 192), np.float32), "at least one embedding"),
    "nan": (np.array([[0.0] * 192, [float("nan")] * 192], np.float32), "embedding 1 has values that are not finite"),
    "infinite": (torch.full((1, 192), float("inf")), "embedding 0 has values that are not finite"),
    "sparse": (torch.zeros(2, 192).to_sparse(), "send a dense one"),
    "meta": (torch.zeros(2, 192, device="meta"), "no elements that can be read"),
    "too long": (np.zeros((128, 192), np.float32), "context length is 128 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, name: str) -> None:
    given, message = BAD[name]
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate({"prompt_embeds": given}, GREEDY)
    assert caught.value.param == "prompt_embeds"


def test_what_has_no_meaning_is_refused(llm: LLM, model: Path, table: torch.Tensor, on: DeviceUnderTest) -> None:
    given: Any = {"prompt_embeds": table[PROMPT]}
    with pytest.raises(RequestError, match="prompt_logprobs: the prompt, or a prompt adapter, has embeddings"):
        llm.generate(given, SamplingParams(prompt_logprobs=1))
    both: Any = {**given, "prompt_token_ids": [1]}
    with pytest.raises(RequestError, match="both prompt_token_ids and prompt_embeds"):
        llm.generate(both, GREEDY)
    outputs = llm.generate([PROMPT, {"prompt_embeds": np.zeros((2, 5), np.float32)}], GREEDY)
    assert (outputs[0].error, outputs[1].outputs[0].finish_reason) == (None, "error")
    with LLM(str(model), **on.engine(OPTIONS)) as off, pytest.raises(RequestError, match="set enable_prompt_embeds"):
        off.generate(given, GREEDY)


def test_a_callers_array_may_change_after_the_call(llm: LLM, table: torch.Tensor) -> None:
    values = table[PROMPT].float().numpy()
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    stream = llm.stream({"prompt_embeds": values}, GREEDY)
    values[:] = 0
    assert [token for delta in stream for token in delta.outputs[0].token_ids] == expected
