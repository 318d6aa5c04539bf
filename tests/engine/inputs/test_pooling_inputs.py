"""Prompts to pool are cut and joined as the tokenizers library does it; parameters are checked against the model."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from pagoda.base.errors import RequestError
from pagoda.base.pooling import ModelTasks, PoolingKind, PoolingParams, PoolingPlan
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.pooling_inputs import check_pooling, instruction_of, join_pair, with_instruction
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.inputs.scoring import Scoring
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, make_facts

WORDS = ["[CLS]", "[SEP]", "a", *(f"w{number}" for number in range(30))]
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "end token": ("$A [SEP]", "$A $B:1 [SEP]:1"),
    "none": ("$A", "$A $B:1"),
}


def backend_of(template: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    single, pair = TEMPLATES[template]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return backend


def inputs_of(template: str, tasks: ModelTasks | None = None, max_model_len: int = 24) -> InputProcessor:
    backend = backend_of(template)
    tokenizer = LibraryTokenizer(backend, make_facts(backend, None, (), None, {}))
    return InputProcessor(tokenizer, InputLimits(len(WORDS), max_model_len, 4, tasks=tasks or ModelTasks()))


def text(first: int, count: int) -> str:
    return " ".join(f"w{(first + at) % 30}" for at in range(count))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("first", "second"), [(1, 1), (5, 5), (9, 2), (2, 9), (12, 13), (3, 30), (20, 19)])
@pytest.mark.parametrize("most", [None, 6, 9, 10, 15])
def test_pairs_are_joined_and_cut_like_the_library_does_it(
    template: str, first: int, second: int, most: int | None
) -> None:
    inputs, backend = inputs_of(template), backend_of(template)
    texts = text(0, first), text(7, second)
    if most is not None:
        backend.enable_truncation(most, strategy="longest_first")
    expected = backend.encode(*texts)
    ids = [inputs.prompts.encode(one, add_special_tokens=False) for one in texts]
    pair = join_pair(*ids, inputs.tokenizer.facts.added, most)
    assert pair.token_ids == expected.ids
    if 1 in expected.type_ids:
        assert pair.pair_start == expected.type_ids.index(1)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("count", [1, 4, 7, 8, 20])
def test_texts_are_cut_like_the_library_does_it(template: str, count: int) -> None:
    inputs, backend = inputs_of(template), backend_of(template)
    backend.enable_truncation(7)
    assert list(inputs.prompts.token_ids_of(text(0, count), keep=7)) == backend.encode(text(0, count)).ids
    request = inputs.process("r", text(0, count), PoolingParams(truncate_prompt_tokens=7), arrival_time_s=0.0)
    assert request.prompt_token_ids.tolist() == backend.encode(text(0, count)).ids


@pytest.mark.parametrize("template", TEMPLATES)
def test_texts_that_are_encoded_together_have_the_tokens_of_each(template: str) -> None:
    inputs = inputs_of(template)
    prompts: list[Prompt] = [text(0, 3), [5, 6], {"prompt": "a a"}, text(7, 19), *(text(at, 5) for at in range(300))]
    params = [PoolingParams(truncate_prompt_tokens=7 if at % 2 else None) for at in range(len(prompts))]
    together = inputs.tokenized(prompts, params)
    assert together[1:3] == prompts[1:3]
    assert all(isinstance(one, dict) and "prompt_token_ids" in one for one in (together[0], *together[3:]))
    for one, prompt, given in zip(together, prompts, params, strict=True):
        found, expected = (inputs.process("r", each, given, arrival_time_s=0.0) for each in (one, prompt))
        assert found.prompt_token_ids.tolist() == expected.prompt_token_ids.tolist()
    assert inputs.tokenized([*prompts, "\ud800"], [*params, PoolingParams()])[0] == prompts[0]


def test_a_prompt_to_pool_may_fill_the_context() -> None:
    inputs = inputs_of("bert")
    assert inputs.process("r", text(0, 22), PoolingParams(), arrival_time_s=0.0).num_prompt_tokens == 24
    with pytest.raises(RequestError, match="length is 24 tokens. However, the prompt has 25 tokens"):
        inputs.process("r", text(0, 23), PoolingParams(), arrival_time_s=0.0)
    cut = inputs.process("r", text(0, 23), PoolingParams(truncate_prompt_tokens=-1), arrival_time_s=0.0)
    assert cut.prompt_token_ids.tolist()[-2:] == [WORDS.index("w21"), WORDS.index("[SEP]")]
    assert inputs.process("r", [5] * 30, PoolingParams(truncate_prompt_tokens=3), arrival_time_s=0.0).pooling


@pytest.mark.parametrize(
    ("kind", "params", "reads"),
    [
        (PoolingKind.LAST, PoolingParams(), True),
        (PoolingKind.LAST, PoolingParams(skip_reading_prefix_cache=True), False),
        (PoolingKind.LAST, PoolingParams(task="token_embed"), False),
        (PoolingKind.LAST, PoolingParams(task="token_classify"), False),
        (PoolingKind.MEAN, PoolingParams(), False),
        (PoolingKind.CLS, PoolingParams(), False),
    ],
)
def test_the_prefix_cache_is_read_where_the_pooling_allows_it(
    kind: PoolingKind, params: PoolingParams, reads: bool
) -> None:
    inputs = inputs_of("bert", ModelTasks(PoolingPlan(kind, labels=("x", "y"))))
    assert inputs.process("r", "a a", params, arrival_time_s=0.0).reads_prefix_cache == reads


def test_parameters_that_a_model_cannot_serve_name_what_it_can() -> None:
    embedder = ModelTasks(generates=False, embedding_size=8)
    classifier = ModelTasks(PoolingPlan(embeds=False, labels=("x", "y")), generates=False)
    ranker = ModelTasks(PoolingPlan(embeds=False, labels=("x",)), generates=False)
    shortened = ModelTasks(PoolingPlan(sizes=(2, 4)), embedding_size=8)
    assert check_pooling(PoolingParams(), embedder).task == "embed"
    assert check_pooling(PoolingParams(dimensions=8), embedder).dimensions == 8
    assert check_pooling(PoolingParams(dimensions=4), shortened).dimensions == 4
    assert check_pooling(PoolingParams(), classifier).task == "classify"
    assert check_pooling(PoolingParams(task="score"), ranker).task == "score"
    for params, tasks, message in (
        (PoolingParams(task="classify"), embedder, "supports embed, score, token_embed"),
        (PoolingParams(task="embed"), classifier, "does not support embed; it supports classify"),
        (PoolingParams(task="score"), classifier, "does not support score; it supports classify"),
        (PoolingParams(task="score"), embedder, "compares the embeddings of two texts"),
        (PoolingParams(dimensions=9), embedder, "dimensions=9 is more than the 8"),
        (PoolingParams(dimensions=4), embedder, "dimensions=4: this model was not trained for shorter embeddings"),
        (PoolingParams(dimensions=3), shortened, "dimensions=3 must be one of 2, 4"),
        (PoolingParams(task="classify", dimensions=1), classifier, "dimensions: only embeddings have it"),
        (PoolingParams(task="classify", normalize=True), classifier, "normalize: only embeddings have it"),
    ):
        with pytest.raises(RequestError, match=message):
            check_pooling(params, tasks)
    with pytest.raises(RequestError, match="does not support generate; it supports embed"):
        embedder.check("generate")


def test_instructions() -> None:
    plan = PoolingPlan(prompts={"query": "Find: ", "document": ""}, default_prompt="query")
    assert instruction_of(plan, None) == instruction_of(plan, "query") == "Find: "
    assert instruction_of(plan, "document") == instruction_of(PoolingPlan(), None) == ""
    with pytest.raises(RequestError, match="prompt_name: 'other' is unknown; the model has document, query"):
        instruction_of(plan, "other")
    assert with_instruction("a", "Find: ") == "Find: a"
    assert with_instruction({"prompt": "a"}, "Find: ") == {"prompt": "Find: a"}
    assert with_instruction([1, 2], "Find: ") == [1, 2]
    assert with_instruction({"prompt_embeds": [], "prompt": "shown"}, "Find: ") == {
        "prompt_embeds": [],
        "prompt": "shown",
    }


def test_pairs_of_a_cross_encoder() -> None:
    ranker = ModelTasks(PoolingPlan(embeds=False, labels=("x",)), generates=False)
    inputs = inputs_of("bert", ranker)
    scoring = Scoring(["a w1"], ["w2", "w3 w4"], PoolingParams(use_activation=False), inputs)
    assert [params.pair_start for params in scoring.params] == [4, 4]
    assert [params.task for params in scoring.params] == ["score", "score"]
    assert scoring.prompts[1] == backend_of("bert").encode("a w1", "w3 w4").ids
    assert scoring.prompts_of(1) == (1,)
    with pytest.raises(RequestError, match=r"data_2\[1\]: .*Unicode"):
        Scoring(["a"], ["a", "\ud800"], None, inputs)


def test_a_conversation_with_a_model_that_generates_no_text() -> None:
    inputs = inputs_of("bert", ModelTasks(generates=False, embedding_size=8))
    with pytest.raises(RequestError, match="this model generates no text; it supports embed"):
        inputs.chats.render([{"role": "user", "content": "x"}])
