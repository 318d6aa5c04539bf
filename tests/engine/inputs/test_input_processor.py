"""From what a user gave to a Request, or to a refusal that names what is wrong."""

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.inputs.chat_prompts import ChatOptions
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.prompts import Prompt, text_of
from pagoda.engine.tokenizers.byte_tokenizer import EOS, ByteTokenizer

MAX_LEN = 32


def processor(**limits: int) -> InputProcessor:
    known = {"vocab_size": 258, "max_model_len": MAX_LEN, "max_num_seqs": 4, "max_logprobs": 5}
    return InputProcessor(ByteTokenizer(), InputLimits(**{**known, **limits}))


def make(prompt: Prompt, seed: int | None = None, **params: object) -> Request:
    inputs = InputProcessor(ByteTokenizer(), processor().limits, seed)
    return inputs.process("r", prompt, SamplingParams(**params), arrival_time_s=1.5)  # type: ignore[arg-type]


def sampling(prompt: Prompt, **params: object) -> SamplingParams:
    made = make(prompt, **params).sampling
    assert made is not None
    return made


@pytest.mark.parametrize(
    "prompt",
    ["abc", [97, 98, 99], (97, 98, 99), np.array([97, 98, 99]), {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}],
)
def test_all_ways_to_write_a_prompt(prompt: Prompt) -> None:
    request = make(prompt)
    assert request.prompt_token_ids.tolist() == [97, 98, 99]
    assert request.prompt_token_ids.dtype == np.int32
    assert request.eos_token_ids == (EOS,)
    assert request.arrival_time_s == 1.5


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ("x" * MAX_LEN, f"length is {MAX_LEN} tokens"),
        ([5, 258], r"prompt token 1 is 258, out of vocabulary \(0 .. 257\)"),
        ([-1], "prompt token 0 is -1"),
        ([2**40], "out of vocabulary"),
        ([1.5], "integer token ids"),
        ([[1], [2]], "flat list"),
        (["a", "b"], "integer token ids"),
        (7, "not int"),
        (None, "not NoneType"),
        (b"abc", "not bytes"),
        ({"text": "x"}, "needs prompt or prompt_token_ids"),
        ("half \ud83d", "character 5"),
    ],
)
def test_prompts_that_cannot_be_served(prompt: Prompt, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        make(prompt)
    assert caught.value.param == "prompt"


def test_params_of_the_wrong_type() -> None:
    with pytest.raises(RequestError, match="expected SamplingParams"):
        processor().process("r", "x", {"n": 1}, arrival_time_s=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"n": 5}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, 999]}, "allowed_token_ids"),
        ({"logit_bias": {258: 1.0}}, "logit_bias"),
        ({"bad_words_token_ids": [[3, 258]]}, "bad_words_token_ids"),
    ],
)
def test_parameters_beyond_the_engines_limits(params: dict[str, object], name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        make("x", **params)
    assert caught.value.param == name


def test_max_tokens_is_cut_to_what_fits() -> None:
    assert sampling("abc", max_tokens=None).max_tokens == MAX_LEN - 3
    assert sampling("abc", max_tokens=1000).max_tokens == MAX_LEN - 3
    assert sampling("abc", max_tokens=7).max_tokens == 7
    assert sampling("abc", max_tokens=1000, min_tokens=500).min_tokens == MAX_LEN - 3


def test_truncation_keeps_the_end() -> None:
    assert make("abcdef", truncate_prompt_tokens=2).prompt_token_ids.tolist() == list(b"ef")
    assert make("ab", truncate_prompt_tokens=5).prompt_token_ids.tolist() == list(b"ab")
    assert make("x" * 99 + "y", truncate_prompt_tokens=-1).num_prompt_tokens == MAX_LEN - 1


def test_truncation_at_the_end_is_asked_for() -> None:
    assert make("abcdef", truncate_prompt_tokens=2, truncation_side="right").prompt_token_ids.tolist() == list(b"ab")
    assert make("abcdef", truncate_prompt_tokens=2, truncation_side="left").prompt_token_ids.tolist() == list(b"ef")
    assert make("y" + "x" * 99, truncate_prompt_tokens=-1, truncation_side="right").prompt_token_ids[0] == ord("y")
    assert make("abc", truncation_side="right").num_prompt_tokens == 3
    with pytest.raises(RequestError, match="truncation_side='middle' is not allowed: it must be left, right or None"):
        make("abc", truncation_side="middle")


def test_bad_words_at_the_beginning_and_after_a_space() -> None:
    given = sampling("x", bad_words=["no", " so"], bad_words_token_ids=[[1, 2]])
    assert given.bad_words_token_ids == ((1, 2), tuple(b"no"), tuple(b" no"), tuple(b"so"), tuple(b" so"))


def test_seeds() -> None:
    assert make("x", seed=None).seed != make("x", seed=None).seed
    for seed in (7, -7):
        assert make("x", seed=seed).seed == make("x", seed=seed).seed
    inputs = InputProcessor(ByteTokenizer(), processor().limits, engine_seed=7)
    one, two = (inputs.process("r", "x", SamplingParams(), arrival_time_s=0.0) for _ in range(2))
    assert one.seed != two.seed
    assert one.handle != two.handle
    other = InputProcessor(ByteTokenizer(), processor().limits, engine_seed=7)
    other.client_index = 1  # of several processes, each draws another series
    of_other = [other.process("r", "x", SamplingParams(), arrival_time_s=0.0).seed for _ in range(2)]
    assert len({one.seed, two.seed, *of_other}) == 4
    given = inputs.process("r", "x", SamplingParams(seed=-1), arrival_time_s=0.0)
    assert given.seed == inputs.process("r", "x", SamplingParams(seed=-1), arrival_time_s=0.0).seed
    assert 0 <= given.seed < 2**62


def test_chat_is_rendered_with_the_models_or_a_given_template() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rendered = processor().chats.render(messages)
    assert (rendered.text, rendered.token_ids) == ("<user>Hi\n<assistant>", list(b"<user>Hi\n<assistant>"))
    assert processor().chats.render(messages, ChatOptions("{{ messages[0].content }}!")).text == "Hi!"
    with pytest.raises(RequestError, match="line 1") as caught:
        processor().chats.render(messages, ChatOptions("{% if %}"))
    assert caught.value.param == "chat_template"


def test_text_of_each_kind_of_prompt() -> None:
    assert text_of("a") == "a"
    assert text_of({"prompt": "b"}) == "b"
    assert text_of({"prompt_token_ids": [1], "prompt": "c"}) == "c"
    assert text_of({"prompt_token_ids": [1]}) is None
    assert text_of([1]) is None
