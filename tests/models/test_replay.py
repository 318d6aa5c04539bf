"""A replayed forward gives the bits of the same forward run op by op, on every architecture."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, KVLayer, OutputRows
from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.replay.program import OpCall, Value, assign_slots
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.models.base import Model
from pagoda.ops.declare import Domain, DType
from pagoda.ops.forward import ForwardOps
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.models.gguf_writer import write_gguf
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import CONFIGS, VOCAB, make_model, save

CPU = torch.device("cpu")
# Prefill of several rows, then decodes next to a chunk, then decodes alone: (row, tokens before, new tokens) per step.
STEPS = [[(0, 0, 9), (1, 0, 1)], [(0, 9, 1), (1, 1, 17), (2, 0, 3)], [(0, 10, 1), (1, 18, 1), (2, 3, 1)], [(2, 4, 1)]]


@pytest.fixture(scope="module")
def library(without_native: Callable[[str], NoReturn]):
    try:
        return load()
    except NativeUnavailable as error:
        without_native(str(error))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def folder(name: str) -> Path:
        return save(make_model(name), tmp_path_factory.mktemp(name))

    return folder


def both(
    folder: Path, ops: NativeOps, dtype: torch.dtype, quantization: str | None = None
) -> tuple[ForwardRunner, ForwardRunner]:
    model = load_model(identify(folder), ops, dtype, CPU, quantization)
    return ForwardRunner(model, ops), ForwardRunner(model, ops, recorder=Programs(ops))


def run(model: ForwardRunner, kv_dtype: torch.dtype) -> list[torch.Tensor]:
    """The logits of every step; each model has a cache of its own."""
    torch.manual_seed(0)
    runner = PagedRunner(model, num_rows=3, max_len=32, dtype=kv_dtype, block_size=8)
    steps = [[(row, start, torch.randint(3, VOCAB, (num,)).tolist()) for row, start, num in step] for step in STEPS]
    with torch.inference_mode():
        return [runner.logits(step) for step in steps]


def one_token(model: ForwardRunner) -> tuple[ForwardBatch, Sequence[KVLayer]]:
    """A decode of one row, and the cache the model was recorded with."""
    assert isinstance(model.recorder, Programs)
    kv = model.recorder._kv
    assert kv is not None
    one = torch.ones(1, dtype=torch.int32)
    start = torch.tensor([0, 1], dtype=torch.int32)
    metadata = AttentionMetadata(start, one, one.view(1, 1), torch.tensor([8]), 8, 1, 1)
    groups = (metadata,) * len(model.model.kv_groups)
    return ForwardBatch(one, one - 1, groups, OutputRows(torch.tensor([0]), groups), torch.tensor([0])), kv


def assert_same(folder: Path, ops: NativeOps, dtype: torch.dtype, quantization: str | None = None) -> ForwardRunner:
    plain, replayed = both(folder, ops, dtype, quantization)
    for got, expected in zip(run(replayed, dtype), run(plain, dtype), strict=True):
        assert torch.equal(got, expected)
    assert replayed.program is not None
    return replayed


@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits(library, folders, name: str) -> None:
    assert_same(folders(name), NativeOps(library, threads=1), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3", "gemma3"])
def test_same_bits_in_half_precision_on_two_threads(library, folders, name: str, dtype: torch.dtype) -> None:
    assert_same(folders(name), NativeOps(library, threads=2), dtype)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_same_bits_in_int8(library, folders, name: str) -> None:
    assert_same(folders(name), NativeOps(library, threads=2), torch.bfloat16, "int8")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_same_bits_of_a_gguf_s_experts(library, tmp_path: Path, kind: Kind) -> None:
    write_gguf(make_model("mixtral"), tmp_path / "model.gguf", kind)
    assert_same(tmp_path / "model.gguf", NativeOps(library, threads=2), torch.bfloat16, "gguf")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_same_bits_on_an_int8_cache(library, folders, name: str) -> None:
    plain, replayed = both(folders(name), NativeOps(library, threads=1), torch.bfloat16)
    wanted = run(plain, torch.int8)
    for got, expected in zip(run(replayed, torch.int8), wanted, strict=True):
        assert torch.equal(got, expected)
    assert replayed.program is not None


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma4-shared"])
def test_a_row_has_the_same_bits_in_any_batch(library, folders, name: str, quantization: str | None) -> None:
    """Compare a prompt in one chunk and alone with chunks next to other rows and another number of threads."""
    alone = both(folders(name), NativeOps(library, threads=1), torch.bfloat16, quantization)[1]
    batched = both(folders(name), NativeOps(library, threads=2), torch.bfloat16, quantization)[1]
    tokens = torch.randint(3, VOCAB, (27,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        first = PagedRunner(alone, 1, 32, torch.bfloat16, 8).logits([(0, 0, tokens)])[0]
        runner = PagedRunner(batched, 3, 32, torch.bfloat16, 8)
        runner.logits([(0, 0, tokens[:11]), (1, 0, tokens[3:5])])
        runner.logits([(1, 2, tokens[7:9]), (0, 11, tokens[11:26]), (2, 0, tokens[1:20])])
        last = runner.logits([(2, 19, [5]), (1, 4, [6, 7]), (0, 26, tokens[26:])])[2]
    assert torch.equal(first, last)


@pytest.mark.parametrize("name", CONFIGS)
def test_whichever_tokens_are_asked_for_have_the_same_bits(library, folders, name: str) -> None:
    """All of a step's hidden states against parts of them: of every row, of some rows, one token, several."""
    generator = torch.Generator().manual_seed(4)
    lengths = (9, 1, 17)
    work = [(row, 0, torch.randint(3, VOCAB, (num,), generator=generator).tolist()) for row, num in enumerate(lengths)]
    plain, replayed = both(folders(name), NativeOps(library, threads=2), torch.bfloat16)
    with torch.inference_mode():
        everything = PagedRunner(plain, 3, 32, torch.bfloat16, 8).hidden(work, lengths).split(lengths)
        runners = [PagedRunner(model, 3, 32, torch.bfloat16, 8) for model in (plain, replayed)]
        for wanted in (lengths, (1, 1, 1), (0, 1, 0), (4, 0, 16), (0, 0, 2), (9, 1, 0)):
            expected = torch.cat(
                [states[len(states) - count :] for states, count in zip(everything, wanted, strict=True)]
            )
            for runner in runners:
                assert torch.equal(runner.hidden(work, wanted), expected)


def test_one_step_an_op_with_gates_fused(library, folders) -> None:
    """Per layer: norm, qkv, rotary_write_kv, attention, out, norm, gate_up with its gate, down; and two selections.

    After them the last norm, the selection of rows with logits, and the head.
    """
    replayed = assert_same(folders("llama"), NativeOps(library, threads=1), torch.float32)
    assert replayed.program is not None
    assert replayed.program.num_steps == 1 + 8 * replayed.model.spec.num_layers + 2 + 1 + 2


def test_measured_times_add_up(library, folders) -> None:
    replayed = assert_same(folders("llama"), NativeOps(library, threads=1), torch.float32)
    assert replayed.program is not None
    assert replayed.program.seconds() == {}
    replayed.program.measure()
    batch, kv = one_token(replayed)
    begin_s = time.perf_counter()
    for _ in range(20):
        replayed.run(batch, kv)
    total_s = time.perf_counter() - begin_s
    seconds = replayed.program.seconds()
    assert seconds["linear"] > 0
    assert seconds["attention"] > 0
    assert seconds["softcap"] == 0
    assert sum(seconds.values()) <= total_s


def test_a_step_without_logits_is_the_same_program(library, folders) -> None:
    """A chunk of a prompt that does not end it: the head multiplies no rows."""
    replayed = assert_same(folders("llama"), NativeOps(library, threads=1), torch.float32)
    batch, kv = one_token(replayed)
    batch = replace(batch, logits_index=torch.empty(0, dtype=torch.int64))
    program = replayed.program
    computed, expected = replayed.run(batch, kv), replayed.run_op_by_op(batch, kv)
    assert torch.equal(computed.hidden, expected.hidden)
    assert expected.logits is None
    assert computed.logits is not None
    assert computed.logits.shape == (0, VOCAB)
    assert replayed.program is program


def test_another_cache_is_recorded_again(library, folders) -> None:
    plain, replayed = both(folders("llama"), NativeOps(library, threads=1), torch.float32)
    first, second = run(replayed, torch.float32), run(replayed, torch.float32)
    for got, again, expected in zip(first, second, run(plain, torch.float32), strict=True):
        assert torch.equal(got, expected)
        assert torch.equal(again, expected)


def assert_runs_op_by_op(model: Model, ops: NativeOps) -> None:
    """With a recorder it computes what it does alone."""
    expected = run(ForwardRunner(model, ops), torch.float32)
    replayed = ForwardRunner(model, ops, recorder=Programs(ops))
    for step, wanted in zip(run(replayed, torch.float32), expected, strict=True):
        assert torch.equal(step, wanted)
    assert replayed.program is None


def test_what_cannot_be_recorded_runs_op_by_op(library, folders, caplog: pytest.LogCaptureFixture) -> None:
    """A model that does sums of its own between the ops."""
    ops = NativeOps(library, threads=1)
    model = both(folders("llama"), ops, torch.float32)[0].model
    forward = model.forward

    def doubled(ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        return forward(ops, batch, kv) * 2

    model.forward = doubled  # type: ignore[method-assign]
    assert_runs_op_by_op(model, ops)
    assert "cannot be recorded" in caplog.text


def test_other_positions_than_the_batchs_are_not_recorded(library, folders, caplog: pytest.LogCaptureFixture) -> None:
    """A model that counts its positions from 1: a program would read the batch's own."""
    ops = NativeOps(library, threads=1)
    model = both(folders("llama"), ops, torch.float32)[0].model
    forward = model.forward

    def shifted(ops: ForwardOps, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        return forward(ops, replace(batch, positions=batch.positions + 1), kv)

    model.forward = shifted  # type: ignore[method-assign]
    assert_runs_op_by_op(model, ops)
    assert "arithmetic on a tensor" in caplog.text


def test_slots_are_reused_but_never_while_in_use() -> None:
    """Random programs: replaying on slots gives what giving every value its own memory gives."""
    generator = torch.Generator().manual_seed(5)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def new_value() -> Value:
        return Value((draw(1, 9),), DType(draw(0, 2)), Domain(draw(0, len(Domain))))

    for _ in range(200):
        values = [new_value()]
        calls = [OpCall("embedding", outputs={"out": values[0]})]
        for _ in range(12):
            picks = [draw(max(0, len(values) - 4), len(values)) for _ in range(2)]
            made = [new_value() for _ in range(picks[0] % 2 + 1)]
            inputs = {str(i): (values[pick], 0) for i, pick in enumerate(picks)}
            calls.append(OpCall("add", inputs=inputs, outputs={str(i): value for i, value in enumerate(made)}))
            values += made
        slots, sizes = assign_slots(calls, values[-1:])
        held: dict[int, Value] = {}
        for call in calls:
            read = [slots[value] for value, _ in call.inputs.values()]
            assert all(held[slots[value]] is value for value, _ in call.inputs.values())
            kept = [value for value in call.outputs.values() if value is not values[-1]]
            taken = [slots[value] for value in kept]
            assert len(set(taken)) == len(taken)
            assert not set(read) & set(taken)
            for value in kept:
                held[slots[value]] = value
                assert sizes[slots[value]][value.domain] >= value.row_bytes
