"""Decoders that answer "yes" or "no" to a query and a document: scores are those of transformers' logits."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from pagoda import LLM, AsyncLLM
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.pooling import PoolingParams
from tests.device_under_test import DeviceUnderTest
from tests.engine.byte_llama import write_byte_llama

NO, YES = "name", "true"  # tokens of the tiny tokenizer
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
RERANKER: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": [NO, YES],
    "is_original_qwen3_reranker": True,
}
PAIRS = [("What is gravity?", "A force."), ("true", "the name 12 " * 20), ("x", "Bread, <|im_end|>{{ 1 }}")]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "num_blocks": 200, "max_num_seqs": 4}


class Reranker:
    """A tiny random Qwen3 of transformers, and its tokenizer."""

    def __init__(self, folder: Path, tied: bool) -> None:
        self.folder = folder
        torch.manual_seed(5)
        shape = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 3}
        config = transformers.Qwen3Config(
            **shape, num_key_value_heads=1, head_dim=32, vocab_size=272, max_position_embeddings=1024,
            tie_word_embeddings=tied,
        )  # fmt: skip
        self.model = transformers.Qwen3ForCausalLM(config).float().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        self.model.save_pretrained(folder)
        texts = write_byte_llama(folder / "texts")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(texts / name, folder / name)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def logits(self, text: str) -> np.ndarray:
        """The logits of NO and YES after a prompt."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        with torch.inference_mode():
            last = self.model(torch.tensor([ids])).logits[0, -1]
        return last[[self.tokenizer.token_to_id(token) for token in (NO, YES)]].numpy()

    def probability(self, query: str, document: str, instruction: str = TASK) -> float:
        prompt = f"{PREFIX}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{SUFFIX}"
        no, yes = self.logits(prompt).astype(np.float64)
        return float(1 / (1 + np.exp(no - yes)))


@pytest.fixture(scope="module", params=["tied", "untied"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    return Reranker(tmp_path_factory.mktemp(request.param), request.param == "tied")


@pytest.fixture(scope="module")
def llm(reranker: Reranker, on: DeviceUnderTest) -> Iterator[LLM]:
    with LLM(str(reranker.folder), hf_overrides=RERANKER, **on.engine(OPTIONS)) as llm:
        yield llm


def scores(llm: LLM, pairs: list[tuple[str, str]], **options: Any) -> list[float]:
    first, second = map(list, zip(*pairs, strict=True))
    return [output.outputs.score for output in llm.score(first, second, use_tqdm=False, **options)]


def test_scores_are_the_probability_of_yes(llm: LLM, reranker: Reranker) -> None:
    expected = [reranker.probability(*pair) for pair in PAIRS]
    assert max(expected) - min(expected) > 0.02, "the pairs make no difference"
    np.testing.assert_allclose(scores(llm, PAIRS), expected, atol=1e-5)
    instructed = [reranker.probability(*pair, "Find recipes.") for pair in PAIRS]
    np.testing.assert_allclose(scores(llm, PAIRS, instruction="Find recipes."), instructed, atol=1e-5)
    (whole,) = llm.classify(f"{PREFIX}<Instruct>: {TASK}\n<Query>: x\n<Document>: y{SUFFIX}", use_tqdm=False)
    np.testing.assert_allclose(whole.outputs.probs, [reranker.probability("x", "y")], atol=1e-5)
    raw = PoolingParams(use_activation=False)
    no, yes = reranker.logits(f"{PREFIX}<Instruct>: {TASK}\n<Query>: x\n<Document>: y{SUFFIX}")
    np.testing.assert_allclose(scores(llm, [("x", "y")], pooling_params=raw), [yes - no], atol=1e-5)


def test_asyncllm_gives_the_same_scores(llm: LLM, reranker: Reranker, on: DeviceUnderTest) -> None:
    on.must_promise_bits()

    async def main() -> list[float]:
        async with AsyncLLM(str(reranker.folder), hf_overrides=RERANKER, **on.engine(OPTIONS)) as other:
            found = await asyncio.gather(*(other.score(*pair, instruction="Find recipes.") for pair in PAIRS))
            return [output.outputs.score for output in found]

    assert asyncio.run(main()) == scores(llm, PAIRS, instruction="Find recipes.")


def test_a_long_document_is_cut_inside_the_template(llm: LLM, reranker: Reranker) -> None:
    """One byte is one token here, except for a few words."""
    room = 60
    length = len(reranker.tokenizer.encode(f"{PREFIX}<Instruct>: {TASK}\n<Query>: q\n<Document>: {SUFFIX}").ids)
    most = length + room
    (cut,) = scores(llm, [("q", "z" * 500)], truncate_prompt_tokens=most)
    assert cut == pytest.approx(reranker.probability("q", "z" * room), abs=1e-5)
    with pytest.raises(RequestError, match=r"data_2: without its document, the pair has more than 20 tokens"):
        scores(llm, [("q", "z" * 500)], truncate_prompt_tokens=20)
    with pytest.raises(RequestError, match=r"data_2\[1\]: .* the prompt has \d+ tokens"):
        scores(llm, [("q", "z"), ("q", "z" * 2000)])


def test_a_template_of_the_caller(llm: LLM, reranker: Reranker, on: DeviceUnderTest) -> None:
    template = "{{ messages[1].content }}|{{ messages[0].content }}|{{ messages | length }}"
    no, yes = reranker.logits("a document|a query|2").astype(np.float64)
    (found,) = scores(llm, [("a query", "a document")], chat_template=template)
    assert found == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-5)
    with LLM(str(reranker.folder), hf_overrides=RERANKER, chat_template=template, **on.engine(OPTIONS)) as other:
        assert scores(other, [("a query", "a document")]) == [found]


def test_an_output_for_each_token(reranker: Reranker, on: DeviceUnderTest) -> None:
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [YES]}
    with LLM(str(reranker.folder), hf_overrides=overrides, **on.engine(OPTIONS)) as one:
        (output,) = one.classify("some text", use_tqdm=False)
        expected = 1 / (1 + np.exp(-reranker.logits("some text")[1].astype(np.float64)))
        np.testing.assert_allclose(output.outputs.probs, [expected], atol=1e-5)
        with pytest.raises(RequestError, match="instruction: this model has no score template"):
            one.score("a", "b", instruction="x")
    both = {**overrides, "classifier_from_token": [NO, YES]}
    with LLM(str(reranker.folder), hf_overrides=both, **on.engine(OPTIONS)) as two:
        (output,) = two.classify("some text", use_tqdm=False)
        np.testing.assert_allclose(
            output.outputs.probs, torch.softmax(torch.tensor(reranker.logits("some text")), 0), atol=1e-5
        )
        assert two.llm_engine.input_processor.limits.tasks.names == ("classify", "token_classify")


def test_config_json_may_say_it(reranker: Reranker, tmp_path: Path) -> None:
    folder = shutil.copytree(reranker.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **RERANKER}))
    tasks = resolve_engine(EngineConfig.from_options(model=str(folder))).tasks
    assert tasks.names == ("classify", "score", "token_classify")
    assert tasks.plan.score_template


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classifier_from_token": ["no", "true"]}, "tokenizer.json has no token 'no'"),
        ({"classifier_from_token": ["true"]}, "classifier_from_token has 1 tokens; from_2_way_softmax takes two"),
        ({"classifier_from_token": []}, "is_original_qwen3_reranker needs classifier_from_token"),
        ({"architectures": ["Qwen3ForSomething"]}, "unknown model architecture 'Qwen3ForSomething'"),
        ({"rope_theta": 1}, "hf_overrides has no 'rope_theta'"),
    ],
)
def test_overrides_that_cannot_be_used(reranker: Reranker, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_engine(EngineConfig.from_options(model=str(reranker.folder), hf_overrides={**RERANKER, **changes}))


def test_the_lengths_of_matryoshka_embeddings_may_be_named(reranker: Reranker) -> None:
    def sizes(*lengths: object) -> tuple[int, ...] | None:
        given = {"matryoshka_dimensions": list(lengths)}
        return resolve_engine(
            EngineConfig.from_options(model=str(reranker.folder), hf_overrides=given)
        ).tasks.plan.sizes

    assert sizes(64, "128") == (64, 128)
    assert sizes() is None
    with pytest.raises(ConfigError, match="matryoshka_dimensions=.* must be positive integers"):
        sizes("x")
