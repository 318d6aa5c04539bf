"""TextEngine: its caller runs the steps, and nothing runs between them."""

import threading

import numpy as np

from pagoda import RequestOutput, RequestOutputKind, SamplingParams
from pagoda.core.request import Request
from pagoda.engine.text_engine import TextEngine
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from pagoda.executors.fake import fake_token
from tests.fake_engine import byte_inputs, fake_core

MAX_TOKENS = 12


def add(engine: TextEngine, name: str) -> Request:
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=1, ignore_eos=True)
    request = engine.prepare(name, f"prompt {name}", params)
    engine.add(request, RequestOutputKind.FINAL_ONLY, f"prompt {name}")
    return request


def run(engine: TextEngine) -> dict[str, RequestOutput]:
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step()}
    return ended


def expected(request: Request) -> list[int]:
    tokens = request.prompt_token_ids.tolist()
    for _ in range(MAX_TOKENS):
        tokens.append(fake_token(np.array(tokens), request.seed, 258))
    return tokens[request.num_prompt_tokens :]


def test_a_caller_steps_requests_to_their_end() -> None:
    num_threads = threading.active_count()
    engine = TextEngine(fake_core(depth=2), byte_inputs())
    requests = {name: add(engine, name) for name in ("a", "b")}
    ended = run(engine)
    assert threading.active_count() == num_threads
    assert ended.keys() == requests.keys()
    for name, request in requests.items():
        (output,) = ended[name].outputs
        assert (ended[name].prompt, output.finish_reason) == (f"prompt {name}", "length")
        assert list(output.token_ids) == expected(request)
        assert output.text == ByteTokenizer().decode(output.token_ids)
    engine.shutdown()


def test_sequences_that_outgrow_the_kv_cache_keep_their_texts() -> None:
    engine = TextEngine(fake_core(num_blocks=6), byte_inputs())
    params = SamplingParams(n=4, max_tokens=100, seed=1, ignore_eos=True)
    engine.add(engine.prepare("a", "prompt", params), RequestOutputKind.FINAL_ONLY, "prompt")
    ended = run(engine)["a"]
    engine.shutdown()
    assert ended.error is None
    assert [output.finish_reason for output in ended.outputs] == ["length"] * 4
    lengths = [len(output.token_ids) for output in ended.outputs]
    assert 0 < min(lengths) < max(lengths) < 100


def test_an_aborted_request_ends_with_its_tokens_so_far_and_others_continue() -> None:
    engine = TextEngine(fake_core(), byte_inputs())
    requests = {name: add(engine, name) for name in ("a", "b")}
    for _ in range(4):
        assert engine.step() == []
    (aborted,) = engine.abort(["a", "unknown"])
    assert (aborted.request_id, aborted.finished, aborted.outputs[0].finish_reason) == ("a", True, "abort")
    assert list(aborted.outputs[0].token_ids) == expected(requests["a"])[:4]
    ended = run(engine)
    assert ended.keys() == {"b"}
    assert list(ended["b"].outputs[0].token_ids) == expected(requests["b"])
    engine.shutdown()
