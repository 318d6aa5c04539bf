"""Images in conversations with tiny models that see: transformers' answers, the prefix cache."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagoda import LLM, AsyncLLM, RequestError, SamplingParams
from tests.engine.images.families import expected_ids, image_of, image_processor, make_model, write_model

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 120, "block_size": 8, "max_model_len": 512,
    "max_num_batched_tokens": 64, "max_num_seqs": 4, "check_invariants": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PLACES = {
    "idefics3": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "pixtral": "[IMG]",
}
FAMILIES = tuple(PLACES)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(family, tmp_path_factory.mktemp(family))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def asking(*content: Any) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one} for one in content
    ]
    return [{"role": "user", "content": parts}]


def tokens(outputs: list[Any]) -> list[int]:
    return outputs[0].outputs[0].token_ids


def test_the_answer_is_that_of_transformers(llm: LLM, family: str) -> None:
    """From pixels to tokens, alone, with others in the batch, and again from the prefix cache."""
    images = [image_of(70, 41), image_of(31, 90, 1)]
    conversations = [
        asking(images[0], "what?"),
        [*asking("say", images[1], "and"), {"role": "assistant", "content": "x"}, *asking(images[0])],
        asking("no image at all"),
    ]
    shown = [[images[0]], [images[1], images[0]], []]
    model, expected = make_model(family), []
    for conversation, pictures in zip(conversations, shown, strict=True):
        ids = llm.llm_engine.input_processor.chats.render(conversation).token_ids
        given = {}
        if pictures:
            nested = [pictures] if family == "idefics3" else pictures
            found = image_processor(family)(images=nested, return_tensors="pt")
            given = {name: found[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in found}
        if family in ("qwen2_vl", "gemma3") and pictures:
            name = "mm_token_type_ids" if family == "qwen2_vl" else "token_type_ids"
            given[name] = (torch.tensor([ids]) == model.config.image_token_id).int()
        with torch.inference_mode():
            answer = model.generate(
                torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0, **given
            )
        expected.append(answer[0, len(ids) :].tolist())
    for _ in range(2):
        assert [output.outputs[0].token_ids for output in llm.chat(conversations, GREEDY)] == expected
    assert [tokens(llm.chat(one, GREEDY)) for one in conversations] == expected


def test_blocks_are_shared_with_the_same_image_only(llm: LLM) -> None:
    image, other = image_of(40, 40), image_of(40, 40, 1)
    first = llm.chat(asking("a text of some length", image, "and more of it"), GREEDY)[0]
    same = llm.chat(asking("a text of some length", image_of(40, 40), "and more of it"), GREEDY)[0]
    unlike = llm.chat(asking("a text of some length", other, "and more of it"), GREEDY)[0]
    assert first.prompt_token_ids == same.prompt_token_ids == unlike.prompt_token_ids
    assert same.num_cached_tokens == (len(first.prompt_token_ids) - 1) // 8 * 8
    before = llm.llm_engine.input_processor.chats.render(asking("a text of some length", image)).media[0].offset
    assert unlike.num_cached_tokens == before // 8 * 8
    assert tokens([first]) == tokens([same]) != tokens([unlike])


def test_streams_several_outputs_and_logprobs(llm: LLM) -> None:
    conversation = asking(image_of(40, 40), "what?")
    expected = tokens(llm.chat(conversation, GREEDY))
    streamed = [token for delta in llm.stream_chat(conversation, GREEDY) for token in delta.outputs[0].token_ids]
    assert streamed == expected
    sampled = SamplingParams(n=3, seed=1, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.chat(conversation, sampled)[0]
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_prompts_without_a_conversation(llm: LLM, family: str) -> None:
    image = image_of(40, 40)
    place = PLACES[family]
    prompt = {"prompt": f"look {place} here", "multi_modal_data": {"image": image}}
    output = llm.generate(prompt, GREEDY)[0]
    assert output.prompt_token_ids == expected_ids(family, f"look {place} here", [image])
    two = {"prompt": f"{place}{place}", "multi_modal_data": {"image": [image, image]}}
    assert llm.generate([two, prompt], GREEDY)[1].outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(RequestError, match="1 places for 2 images"):
        llm.generate({"prompt": place, "multi_modal_data": {"image": [image, image]}}, GREEDY)
    with pytest.raises(RequestError, match="multi_modal_data is \\['audio'\\], expected an object with image"):
        llm.generate({"prompt": place, "multi_modal_data": {"audio": np.zeros(3)}}, GREEDY)


def test_a_folder_without_settings_of_images_is_served_as_a_text_model(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder, tmp_path / "text", ignore=shutil.ignore_patterns("*processor_config.json"))
    with LLM(str(tmp_path / "text"), served_model_name="words", **OPTIONS) as llm:
        for content in ("no image", [{"type": "text", "text": "no image"}]):
            assert (
                "no image" in llm.llm_engine.input_processor.chats.render([{"role": "user", "content": content}]).text
            )
        with pytest.raises(RequestError, match="is an image, but words takes text only"):
            llm.chat(asking(image_of(8, 8)), GREEDY)
    assert "has no preprocessor_config.json" in caplog.text


def test_an_async_program(folder: Path) -> None:
    conversation = asking(image_of(40, 40), "what?")

    async def run() -> tuple[list[int], list[int]]:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            whole = [output.outputs[0].token_ids async for output in llm.chat(conversation, GREEDY)][-1]
            streamed = [output.outputs[0].token_ids async for output in llm.stream_chat(conversation, GREEDY)]
            return whole, [token for delta in streamed for token in delta]

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    assert len(whole) == 10
