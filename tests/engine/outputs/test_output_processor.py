"""Columns of tokens to outputs: cumulative, delta and final, ends of every kind, log-probabilities, sequences."""

import numpy as np
import pytest

from pagoda.base.outputs import RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Admitted, ClientEvent, Ended, Events, Held, Preempted, Queued, Routed
from pagoda.core.request import AdmitKind, Reason, Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs, LogprobColumns
from pagoda.engine.outputs import output_processor
from pagoda.engine.outputs.detokenizer import StopStrings
from pagoda.engine.outputs.output_processor import OutputKind, OutputProcessor, ProcessedOutputs
from pagoda.engine.outputs.split_outputs import split_outputs
from pagoda.engine.tokenizers.byte_tokenizer import EOS, ByteTokenizer

STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


def request(handle: int = 1, **params: object) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(f"r{handle}", np.array([1, 2, 3], np.int32), sampling, handle=handle, arrival_time_s=10.0)


def core_outputs(
    emitted: list[tuple[int, int, list[int]]], events: tuple[ClientEvent, ...] = (), **more: object
) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.array([handle for handle, _, _ in emitted], np.int64),
        sequences=np.array([sequence for _, sequence, _ in emitted], np.int32),
        counts=np.array([len(ids) for _, _, ids in emitted], np.int32),
        token_ids=np.array([token for _, _, ids in emitted for token in ids], np.int32),
        events=Events(events),
        **more,  # type: ignore[arg-type]
    )


def end(handle: int, status: RequestStatus, sequence: int = 0, **more: object) -> Ended:
    return Ended(1, 0.0, 0, handle, f"r{handle}", sequence, status, **more)  # type: ignore[arg-type]


def admitted(handle: int, num_cached: int) -> Admitted:
    return Admitted(1, 0.0, 0, handle, AdmitKind.NEW, 3, num_cached, num_cached, 1, 1, 8)


def run(
    kind: OutputKind, steps: list[list[int]], last: Ended | None, **params: object
) -> tuple[list[RequestOutput], list[ProcessedOutputs]]:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(**params), kind, "prompt")
    done = [
        processor.process(core_outputs([(1, 0, ids)], (last,) if last and i == len(steps) - 1 else ()), 11.0 + i)
        for i, ids in enumerate(steps)
    ]
    return [output for part in done for output in part.outputs], done


def test_prompts_with_the_same_stop_strings_share_one_automaton(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, ...]] = []

    def counting(strings: tuple[str, ...]) -> StopStrings:
        built.append(strings)
        return StopStrings(strings)

    monkeypatch.setattr(output_processor, "StopStrings", counting)
    processor = OutputProcessor(ByteTokenizer())
    for handle in range(64):
        processor.open(request(handle, stop=["a" * 100, "b"]), OutputKind.DELTA)
    processor.open(request(64, stop=["c"]), OutputKind.DELTA)
    assert built == [("a" * 100, "b"), ("c",)]
    for handle in range(64):
        processor.close(f"r{handle}")
    processor.open(request(65, stop=["a" * 100, "b"]), OutputKind.DELTA)
    assert len(built) == 3, "an automaton outlives its requests"


STEPS = [[ord(c) for c in part] for part in ("He", "l", "lo", " w€"[:2])]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_the_three_output_kinds_agree(kind: OutputKind) -> None:
    outputs, _ = run(kind, STEPS, end(1, LENGTH))
    parts = [output.outputs[0] for output in outputs]
    if kind is OutputKind.DELTA:
        assert [part.text for part in parts] == ["He", "l", "lo", " w"]
        assert [token for part in parts for token in part.token_ids] == list(b"Hello w")
    elif kind is OutputKind.CUMULATIVE:
        assert [part.text for part in parts] == ["He", "Hel", "Hello", "Hello w"]
        assert parts[-1].token_ids == list(b"Hello w")
    else:
        assert [(part.text, part.token_ids) for part in parts] == [("Hello w", list(b"Hello w"))]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert parts[-1].finish_reason == "length"
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r1", "prompt", [1, 2, 3])
    assert last.metrics is not None
    assert (last.metrics.arrival_time, last.metrics.finished_time) == (10.0, 14.0)
    assert last.metrics.first_token_time == 11.0


@pytest.mark.parametrize("kind", list(OutputKind))
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abX")])
def test_a_stop_token_counts_as_a_token_but_has_no_text(kind: OutputKind, include: bool, text: str) -> None:
    last = end(1, STOPPED, stop_reason=ord("X"))
    outputs, done = run(kind, [[97], [98, ord("X")]], last, include_stop_str_in_output=include)
    assert "".join(o.outputs[0].text for o in outputs) == text if kind is OutputKind.DELTA else True
    final = outputs[-1].outputs[0]
    assert (final.finish_reason, final.stop_reason) == ("stop", ord("X"))
    if kind is not OutputKind.DELTA:
        assert (final.text, final.token_ids) == (text, [97, 98, ord("X")])
    assert all(not part.stopped for part in done)


def test_eos_has_no_text_even_if_special_tokens_are_shown() -> None:
    outputs, _ = run(OutputKind.CUMULATIVE, [[97, EOS]], end(1, STOPPED), skip_special_tokens=False)
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].stop_reason) == ("a", None)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_a_stop_string_ends_the_sequence_and_notifies_the_core(kind: OutputKind) -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(stop="lo w"), kind)
    told: list[RequestOutput] = []
    for ids in STEPS:
        done = processor.process(core_outputs([(1, 0, ids)]), 0.0)
        told += done.outputs
    assert done.stopped == [(1, 0)]
    assert told[-1].finished
    final = told[-1].outputs[0]
    assert (final.finish_reason, final.stop_reason) == ("stop", "lo w")
    text = "".join(o.outputs[0].text for o in told) if kind is OutputKind.DELTA else final.text
    assert text == "Hel"
    late = processor.process(core_outputs([(1, 0, [1, 2])], (end(1, STOPPED),)), 0.0)
    assert (late.outputs, late.stopped) == ([], [])
    assert len(processor) == 0


def test_a_stop_string_wins_over_an_end_in_the_same_step() -> None:
    outputs, done = run(OutputKind.CUMULATIVE, [[97, 98, EOS]], end(1, STOPPED), stop="b")
    final = outputs[-1].outputs[0]
    assert (final.text, final.token_ids, final.stop_reason) == ("a", [97, 98], "b")
    assert done[-1].stopped == []  # the core has ended it already


def test_text_held_back_is_returned_at_the_end() -> None:
    outputs, _ = run(OutputKind.DELTA, [[97], [98], [99]], end(1, LENGTH), stop="bcd")
    assert [o.outputs[0].text for o in outputs] == ["a", "", "bc"]
    assert [o.outputs[0].token_ids for o in outputs] == [[97], [98], [99]]


def test_sequences_end_one_by_one() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(n=3), OutputKind.DELTA)
    first = processor.process(core_outputs([(1, 0, [97]), (1, 1, [98]), (1, 2, [99])]), 0.0).outputs
    assert [[(part.index, part.text) for part in o.outputs] for o in first] == [[(0, "a"), (1, "b"), (2, "c")]]
    second = processor.process(core_outputs([(1, 0, [97]), (1, 2, [99])], (end(1, LENGTH, 0),)), 0.0).outputs
    assert [(part.index, part.finish_reason) for part in second[0].outputs] == [(0, "length"), (2, None)]
    third = processor.process(core_outputs([(1, 1, [98]), (1, 2, [99])], (end(1, LENGTH, 1), end(1, LENGTH, 2))), 0.0)
    assert third.outputs[0].finished
    assert [part.index for part in third.outputs[0].outputs] == [1, 2]


def test_log_probabilities() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1, logprobs=2), OutputKind.CUMULATIVE)
    processor.open(request(2), OutputKind.CUMULATIVE)
    columns = LogprobColumns(
        token_ids=np.array([[5, 7, 8, 9], [97, 97, 98, 99], [120, 65, 66, 67]], np.int32),
        logprobs=np.array([[0, 0, 0, 0], [-1, -1, -2, -3], [-9, -0.5, -1.5, -2]], np.float32),
        ranks=np.array([1, 1, 40], np.int32),
    )
    out = processor.process(core_outputs([(2, 0, [5]), (1, 0, [97, 120])], logprobs=columns), 0.0).outputs
    by_id = {o.request_id: o.outputs[0] for o in out}
    assert by_id["r2"].logprobs is None
    logprobs = by_id["r1"].logprobs
    assert logprobs is not None
    assert [{i: (e.logprob, e.rank, e.decoded_token) for i, e in entry.items()} for entry in logprobs] == [
        {97: (-1.0, 1, "a"), 98: (-2.0, 2, "b")},
        {120: (-9.0, 40, "x"), 65: (-0.5, 1, "A"), 66: (-1.5, 2, "B")},
    ]
    assert by_id["r1"].cumulative_logprob == -10.0


def test_a_character_belongs_to_its_last_token() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1, logprobs=1), OutputKind.CUMULATIVE)
    tokens, others = [*"é€a".encode(), 0xFF], [0xA8, 0xA8, 98, 0x82, 0xAD, 98, 98]
    columns = LogprobColumns(
        np.array([[own, own, other] for own, other in zip(tokens, others, strict=True)], np.int32)[:, [0, 2]],
        np.zeros((7, 2), np.float32),
        np.ones(7, np.int32),
    )
    (out,) = processor.process(core_outputs([(1, 0, tokens)], logprobs=columns), 0.0).outputs
    assert out.outputs[0].logprobs is not None
    shown = [[one.decoded_token for one in entry.values()] for entry in out.outputs[0].logprobs]
    assert [entry[0] for entry in shown] == ["", "é", "", "", "€", "a", "\ufffd"]
    assert (shown[1][1], shown[4][1]) == ("è", "\u20ad")


def test_a_character_of_a_prompt_may_begin_with_its_first_token() -> None:
    processor = OutputProcessor(ByteTokenizer())
    tokens = [*"日本".encode()]
    asked = Request("r1", np.array(tokens, np.int32), SamplingParams(prompt_logprobs=0), handle=1)
    processor.open(asked, OutputKind.CUMULATIVE)
    ids = np.array(tokens[1:], np.int32)
    columns = LogprobColumns(ids[:, None], np.zeros((5, 1), np.float32), np.ones(5, np.int32))
    (out,) = processor.process(core_outputs([(1, 0, [97])], prompt_logprobs={1: columns}), 0.0).outputs
    assert out.prompt_logprobs is not None
    shown = [next(iter(entry.values())).decoded_token for entry in out.prompt_logprobs[1:] if entry]
    assert shown == ["", "日", "", "", "本"]


def test_without_text_candidates_have_no_text() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1, logprobs=1, detokenize=False), OutputKind.CUMULATIVE)
    columns = LogprobColumns(np.array([[97, 98]], np.int32), np.array([[-1, -2]], np.float32), np.array([1], np.int32))
    (out,) = processor.process(core_outputs([(1, 0, [97])], logprobs=columns), 0.0).outputs
    assert out.outputs[0].logprobs is not None
    assert [one.decoded_token for one in out.outputs[0].logprobs[0].values()] == [None, None]


def test_prompt_logprobs_come_chunk_by_chunk() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1, prompt_logprobs=1), OutputKind.FINAL_ONLY)
    for token in (2, 3):
        columns = LogprobColumns(np.array([[token, 65]], np.int32), np.array([[-3.0, -1]], np.float32), np.array([9]))
        processor.process(core_outputs([], prompt_logprobs={1: columns}), 0.0)
    out = processor.process(core_outputs([(1, 0, [97])], (admitted(1, 2), end(1, LENGTH))), 0.0).outputs
    rows = out[0].prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    assert [list(row) for row in rows[1:] if row is not None] == [[2, 65], [3, 65]]
    assert out[0].num_cached_tokens == 2


def test_a_lazy_processor_leaves_the_logprobs_of_prompts_to_the_reader() -> None:
    processor = OutputProcessor(ByteTokenizer(), is_lazy=True)
    prompt_logprobs = processor.open(request(1, prompt_logprobs=1), OutputKind.FINAL_ONLY)
    assert prompt_logprobs is not None
    more_than_asked = LogprobColumns(np.full((5, 2), 65, np.int32), np.zeros((5, 2), np.float32), np.ones(5, np.int32))
    processor.process(core_outputs([], prompt_logprobs={1: more_than_asked}), 0.0)
    out = processor.process(core_outputs([(1, 0, [97])], (end(1, LENGTH),)), 0.0).outputs
    rows = out[0].prompt_logprobs
    assert rows == [None]
    while prompt_logprobs.convert_some():
        pass
    assert len(rows) == len(out[0].prompt_token_ids or []), "one entry per prompt token"


def test_errors_aborts_and_unknown_requests() -> None:
    processor = OutputProcessor(ByteTokenizer())
    for handle in (1, 2, 3):
        processor.open(request(handle), OutputKind.DELTA)
    out = processor.process(
        core_outputs([(9, 0, [1])], (end(1, RequestStatus.FINISHED_ERROR, message="numbers went wrong"),)), 0.0
    ).outputs
    assert [(o.request_id, o.error, o.outputs[0].finish_reason) for o in out] == [("r1", "numbers went wrong", "error")]
    aborted = processor.abort(["r2", "unknown"], 5.0)
    assert [(o.request_id, o.finished, o.outputs[0].finish_reason) for o in aborted] == [("r2", True, "abort")]
    processor.close("r3")
    assert len(processor) == 0


def test_no_text_if_detokenize_is_off() -> None:
    for kind in OutputKind:
        outputs, _ = run(kind, STEPS, end(1, LENGTH), detokenize=False)
        assert all(o.outputs[0].text == "" for o in outputs)
        assert outputs[-1].finished


def test_logprobs_that_a_stream_has_read_are_not_kept() -> None:
    processor = OutputProcessor(ByteTokenizer())
    params = SamplingParams(max_tokens=50, logprobs=1)
    processor.open(Request("a", np.ones(3, np.int32), params, handle=1), OutputKind.DELTA)
    columns = LogprobColumns(np.full((1, 2), 65, np.int32), np.full((1, 2), -1.0, np.float32), np.ones(1, np.int32))
    for step in range(20):
        outputs = EngineCoreOutputs(
            handles=np.array([1]),
            sequences=np.array([0]),
            counts=np.array([1]),
            token_ids=np.array([65], np.int32),
            logprobs=columns,
        )
        (delta,) = processor.process(outputs, 0.0).outputs
        assert len(delta.outputs[0].logprobs or ()) == 1
        assert delta.outputs[0].cumulative_logprob == -1.0 - step
    sequence = processor._by_id["a"].sequences[0]
    assert sequence._logprobs == []


@pytest.mark.parametrize("kind", list(OutputKind))
def test_an_output_that_the_kv_cache_cuts_short_is_an_output_and_an_empty_one_an_error(kind: OutputKind) -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1, n=2), kind)
    processor.open(request(2), kind)
    tokens = core_outputs([(1, 0, [104]), (1, 1, [105])])
    outputs = processor.process(tokens, 11.0).outputs
    cut = (end(1, LENGTH, 0, message="too few blocks"), end(1, LENGTH, 1), end(2, LENGTH, message="too few blocks"))
    outputs += processor.process(core_outputs([], cut), 12.0).outputs
    first, second = (one for one in outputs if one.finished)
    assert (first.error, [part.finish_reason for part in first.outputs]) == (None, ["length", "length"])
    assert (second.error, second.outputs[0].text) == ("too few blocks", "")


@pytest.mark.parametrize("most", [1, 6, 9, 12, 1_000])
def test_a_step_in_parts_gives_what_it_gives_at_once(most: int) -> None:
    """Each part has few log-probabilities to convert; the tokens of a sequence stay together, and with its end."""
    num_tokens, num_columns = 8, 3
    columns = LogprobColumns(
        np.arange(num_tokens * num_columns, dtype=np.int32).reshape(num_tokens, num_columns) % 26 + 97,
        np.linspace(-5, -1, num_tokens * num_columns, dtype=np.float32).reshape(num_tokens, num_columns),
        np.ones(num_tokens, np.int32),
    )
    tokens = columns.token_ids[:, 0].tolist()
    step = core_outputs(
        [(1, 0, tokens[:2]), (2, 0, tokens[2:3]), (3, 0, tokens[3:6]), (4, 0, tokens[6:])],
        (admitted(1, 2), end(2, LENGTH), end(3, LENGTH), end(5, LENGTH)),
        logprobs=columns,
    )
    found: list[dict[str, object]] = []
    parts = list(split_outputs(step, most))
    for given in ([step], parts):
        processor = OutputProcessor(ByteTokenizer())
        for handle in range(1, 6):
            processor.open(request(handle, logprobs=2), OutputKind.DELTA)
        outs = [one for part in given for one in processor.process(part, 0.0).outputs]
        found.append({one.request_id: (one.outputs, one.finished, one.num_cached_tokens) for one in outs})
        assert len(outs) == len(found[-1]) == 5
    assert found[0] == found[1]
    assert (len(parts) > 1) == (most < columns.token_ids.size)
    sizes = [len(part.token_ids) for part in parts]
    assert all(
        size * num_columns <= most or len(part.handles) == 1 for size, part in zip(sizes, parts, strict=True) if size
    )


def test_the_schedulers_time_counts_while_a_request_waits_or_runs_also_across_engines() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1), OutputKind.DELTA)
    processor.process(core_outputs([(1, 0, [72])], scheduler_s=2.0), 11.0)  # the engine is older than this client
    processor.open(request(2), OutputKind.DELTA)
    (first,) = processor.process(core_outputs([(1, 0, [72])], scheduler_s=2.5), 12.0).outputs
    assert first.metrics is not None
    assert (first.metrics.scheduler_time, first.metrics.last_token_time) == (0.5, 12.0)
    processor.process(core_outputs([(2, 0, [72])], scheduler_s=0.25), 13.0)  # of the next engine
    (second,) = processor.process(core_outputs([(2, 0, [72])], (end(2, LENGTH),), scheduler_s=1.0), 14.0).outputs
    assert second.metrics is not None
    assert second.metrics.scheduler_time == 1.5


def test_the_schedulers_of_replicas_take_their_time_apart() -> None:
    processor = OutputProcessor(ByteTokenizer())
    for handle in (1, 2):
        processor.open(request(handle), OutputKind.CUMULATIVE)
        processor.process(core_outputs([], (Routed(0, 0.0, 0, handle, handle, "it has least to do"),)), 10.0)

    def step(handle: int, scheduler_s: float) -> float:
        (output,) = processor.process(core_outputs([(handle, 0, [72])], scheduler_s=scheduler_s), 11.0).outputs
        assert output.metrics is not None
        return output.metrics.scheduler_time

    assert [step(1, 5.0), step(2, 1.0), step(1, 5.5), step(2, 1.25)] == [0.0, 0.0, 0.5, 0.25]
    processor.process(core_outputs([], (Routed(0, 0.0, 0, 1, 2, "its replica has ended"),)), 12.0)
    assert [step(1, 1.5), step(2, 2.0), step(1, 2.25)] == [0.75, 1.0, 1.5]


def test_what_a_request_waited_for_and_what_preemptions_cost_is_in_its_metrics() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.open(request(1), OutputKind.DELTA, sent_s=10.25)
    held = (0, 4, 1)  # position, blocks
    entered = (3, 0, 0, 3, 1, 8)
    story = (
        Queued(1, 10.5, 0, 1, "r1", 3, 1, 0),
        Held(1, 11.0, 0, 1, Reason.BLOCKS, *held),
        Held(3, 13.0, 0, 1, Reason.GRAMMAR, *held),
        Held(3, 13.75, 0, 1, Reason.TURN, *held),
        Held(4, 14.0, 0, 1, Reason.BLOCKS, *held),
        Admitted(5, 14.25, 0, 1, AdmitKind.NEW, *entered),
        Preempted(6, 15.0, 0, 1, 0, 2, "recompute", 3, 1),
        Held(7, 16.0, 0, 1, Reason.NUM_SEQS, *held),
        Admitted(8, 17.0, 0, 1, AdmitKind.RESUMED, *entered),
        Admitted(9, 18.0, 0, 1, AdmitKind.RESUMED, *entered),  # on another engine
        Preempted(9, 20.0, 0, 1, 0, 2, "swap", 0, 1),
        Admitted(10, 20.5, 0, 1, AdmitKind.RESUMED, *entered),
    )
    (output,) = processor.process(core_outputs([(1, 0, [72])], story), 21.0).outputs
    metrics = output.metrics
    assert metrics is not None
    reasons = {"admission and tokenizing": 0.25, "the engine to see it": 0.25, "its turn": 0.75}
    reasons |= {"not enough free blocks": 2.25, "grammar not compiled yet": 0.75}
    assert metrics.queue_reasons == reasons
    assert metrics.time_in_queue == sum(metrics.queue_reasons.values())
    assert (metrics.num_preemptions, metrics.num_lost_tokens, metrics.preempted_time) == (2, 3, 2.5)
