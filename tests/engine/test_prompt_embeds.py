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
from pagoda.core.request import MediaItem
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

    def note(given: object, size: int) -> np.ndarray:
        readers.append(threading.get_ident())
        return read_embeds(given, size)

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
        assert np.array_equal(request.prompt_embeds, values.numpy())

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
        chain = HashChain(make_root(b"", None, None), 4, embeds=given, **more)
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
