"""Recorded programs: named inputs, row domains, dtypes and numbers of layers, against the same forward run op by op."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from pagoda.base.errors import InvariantBroken
from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, Input, KVLayer, OutputRows
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.replay.program import Program
from pagoda.kernels.replay.recorder import NotRecordable, record_forward
from pagoda.ops.declare import Activation, Domain
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.kernels.paged import Geometry, make_metadata

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB = 64, 4, 2, 16, 50
GEOMETRY = Geometry(HEADS, KV_HEADS, DIM, 8, torch.bfloat16)
Forward = Callable[..., object]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 3).bfloat16()


class SmallModel:
    """One layer with what is to come: prompt embeddings, an adapter per row, encoder states, a mixture of experts."""

    generates, num_token_types = False, 0

    def __init__(self, ops: NativeOps) -> None:
        self.table = draw(VOCAB, HIDDEN)
        self.norm = draw(HIDDEN, seed=1)
        self.cos, self.sin = torch.randn(40, DIM // 2), torch.randn(40, DIM // 2)
        self.qkv = ops.prepare_linear(draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, seed=2))
        self.out = ops.prepare_linear(draw(HIDDEN, HEADS * DIM, seed=3))
        self.router = ops.prepare_linear(draw(8, HIDDEN, seed=4))
        self.gate_up = ops.prepare_experts([ops.prepare_linear(draw(64, HIDDEN, seed=10 + e)) for e in range(8)])
        self.down = ops.prepare_experts([ops.prepare_linear(draw(HIDDEN, 32, seed=20 + e)) for e in range(8)])
        self.gate = ops.prepare_linear(draw(128, HIDDEN, seed=5))
        self.adapters = draw(3, HIDDEN, seed=6)

    def forward(self, ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
        x = ops.embedding(batch.token_ids, self.table)
        if "embeddings" in batch.inputs:
            x = ops.add(x, batch.inputs["embeddings"].tensor)
        residual = x
        x = ops.rms_norm(x, self.norm, 1e-5)
        q, k, v = ops.split_qkv(ops.linear(x, self.qkv), HEADS, KV_HEADS, DIM)
        q = ops.rotary_write_kv(q, k, v, batch.positions, self.cos, self.sin, kv[0], batch.metadata[0])
        q, residual = ops.select_rows(q, batch.outputs.index), ops.select_rows(residual, batch.outputs.index)
        x = ops.linear(ops.attention(q, kv[0], batch.outputs.metadata[0], 0.25), self.out)
        x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
        if batch.num_layers == 1:  # without its experts
            return x
        x = ops.moe(x, *ops.route(ops.logits(x, self.router), 2, True), self.gate_up, self.down)
        if "encoder" in batch.inputs:
            gate_up = ops.linear(batch.inputs["encoder"].tensor, self.gate)  # rows of their own domain
            states = ops.gate(gate_up, Activation.SILU)
            x = ops.add(x, ops.select_rows(states, batch.inputs["of_encoder"].tensor))
        return ops.add(x, residual)


def batch_of(lens: list[tuple[int, int]], **inputs: Input) -> ForwardBatch:
    """Rows with (computed, new) tokens, of which the last token of each is asked for."""
    blocks = [[2 * row + 1, 2 * row + 2] for row in range(len(lens))]
    metadata = make_metadata(GEOMETRY, lens, blocks)
    ends = metadata.query_start[1:].long() - 1
    ones = torch.arange(len(lens) + 1, dtype=torch.int32)
    of_outputs = replace(metadata, query_start=ones, max_query_len=1)
    tokens = int(metadata.query_start[-1])
    positions = torch.cat([torch.arange(start, start + new) for start, new in lens]).int()
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens)).int()
    return ForwardBatch(ids, positions, (metadata,), OutputRows(ends, (of_outputs,)), torch.arange(len(lens)), inputs)


def caches() -> tuple[list[KVLayer], list[KVLayer]]:
    return [GEOMETRY.new_cache(8)], [GEOMETRY.new_cache(8)]


STEPS = [[(0, 5), (0, 9), (0, 1)], [(5, 1), (9, 1), (1, 3)], [(6, 7)]]


def with_inputs(lens: list[tuple[int, int]], names: str, seed: int) -> ForwardBatch:
    batch = batch_of(lens)
    tokens, outputs = len(batch.token_ids), len(batch.outputs.index)
    given: dict[str, Input] = {}
    if "embeddings" in names:
        given["embeddings"] = Input(draw(tokens, HIDDEN, seed=seed))
    if "encoder" in names:
        given["encoder"] = Input(draw(11 + seed, HIDDEN, seed=seed), Domain.EMBEDS)
        given["of_encoder"] = Input(torch.arange(outputs) * 2, Domain.OUTPUTS)
    return replace(batch, inputs=given, num_layers=1 if "draft" in names else 0)


@pytest.mark.parametrize("names", ["", "embeddings", "encoder", "embeddings encoder", "draft", "draft embeddings"])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_kind_of_batch_has_the_bits_of_its_ops(native: NativeOps, names: str, threads: int) -> None:
    ops = NativeOps(native.library, threads)
    model = SmallModel(ops)
    programs = Programs(ops)
    replayed = ForwardRunner(model, ops, recorder=programs)  # type: ignore[arg-type]
    ours, theirs = caches()
    for seed, lens in enumerate(STEPS):
        batch = with_inputs(lens, names, seed)
        got, want = replayed.run(batch, ours).hidden, model.forward(ops, batch, theirs)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert len(programs._programs) == 1
    assert None not in programs._programs.values()


def test_kinds_of_batches_are_recorded_side_by_side(native: NativeOps) -> None:
    model = SmallModel(native)
    programs = Programs(native)
    replayed = ForwardRunner(model, native, recorder=programs)  # type: ignore[arg-type]
    ours, theirs = caches()
    for seed, names in enumerate(["", "draft", "embeddings", "", "draft", "encoder", "embeddings", ""]):
        batch = with_inputs(STEPS[0], names, seed)
        assert torch.equal(replayed.run(batch, ours).hidden, model.forward(native, batch, theirs))
    assert len(programs._programs) == 4
    steps = {len(key[0]): program.num_steps for key, program in programs._programs.items() if not key[1]}
    assert steps[1] == steps[0] + 1  # prompt embeddings are one addition


def record(native: NativeOps, forward: Forward, batch: ForwardBatch, kv: list[KVLayer]) -> Program:
    return record_forward(native.library, 1, forward, batch, kv)  # type: ignore[arg-type]


def test_a_program_may_have_several_results(native: NativeOps) -> None:
    """As a pipeline's stage, which hands on the hidden states and the residual."""
    model = SmallModel(native)

    def stage(ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
        x = ops.embedding(batch.token_ids, model.table)
        return ops.add_rms_norm(x, batch.inputs["residual"].tensor, model.norm, 1e-5)

    batch = replace(batch_of(STEPS[0]), inputs={"residual": Input(draw(15, HIDDEN))})
    kv = caches()[0]
    got = record(native, stage, batch, kv).run(batch)
    for one, other in zip(got, stage(native, batch, kv), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda ops, b, kv: ops.embedding(b.token_ids, TABLE) * 2, "arithmetic"),
        (lambda ops, b, kv: torch.relu(ops.embedding(b.token_ids, TABLE)), "relu of torch"),
        (lambda ops, b, kv: ops.embedding(b.token_ids, TABLE).float(), "'float' of a tensor"),
        (lambda ops, b, kv: ops.add(torch.zeros(3, HIDDEN), ops.embedding(b.token_ids, TABLE)), "no recorded op made"),
        (lambda ops, b, kv: ops.prepare_linear(TABLE), "'prepare_linear' within a forward"),
        (lambda ops, b, kv: b.token_ids, "a result that is an input"),
        (lambda ops, b, kv: ops.split_qkv(ops.embedding(b.token_ids, TABLE), 2, 1, 16)[0], "a part of another value"),
        (lambda ops, b, kv: mixed_domains(ops, b), "rows of different domains"),
        (lambda ops, b, kv: experts_beyond_those_there_are(ops, b), "moe: experts that is not an input"),
        (lambda ops, b, kv: attention_of_the_wrong_rows(ops, b, kv), "with metadata of OUTPUTS rows"),
        (lambda ops, b, kv: unknown_metadata(ops, b, kv), "metadata that is not the batch's"),
    ],
)
def test_a_forward_that_cannot_be_recorded_gives_the_reason(native: NativeOps, forward: Forward, said: str) -> None:
    with pytest.raises(NotRecordable, match=said):
        record(native, forward, batch_of(STEPS[0]), caches()[0])


TABLE = draw(VOCAB, HIDDEN)


def mixed_domains(ops, batch: ForwardBatch):
    x = ops.embedding(batch.token_ids, TABLE)
    return ops.moe(ops.select_rows(x, batch.outputs.index), *ops.route(x, 1, True), *experts(ops))


def experts_beyond_those_there_are(ops, batch: ForwardBatch):
    x = ops.embedding(batch.token_ids, TABLE)
    return ops.moe(x, *ops.route(ops.join(x, x), 1, True), *experts(ops))


def experts(ops):
    native = NativeOps(ops._library, 1)
    return (
        native.prepare_experts([native.prepare_linear(draw(64, HIDDEN)) for _ in range(HIDDEN)]),
        native.prepare_experts([native.prepare_linear(draw(HIDDEN, 32)) for _ in range(HIDDEN)]),
    )


def attention_of_the_wrong_rows(ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
    q, *_ = ops.split_qkv(ops.embedding(batch.token_ids, TABLE), 2, 1, 16)
    return ops.attention(q, kv[0], batch.outputs.metadata[0], 0.1)


def unknown_metadata(ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
    q, *_ = ops.split_qkv(ops.embedding(batch.token_ids, TABLE), 2, 1, 16)
    return ops.attention(q, kv[0], replace(batch.metadata[0]), 0.1)


def test_a_gate_is_not_fused_where_its_input_is_read_again(native: NativeOps) -> None:
    model = SmallModel(native)

    def once(ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
        return ops.gate(ops.linear(ops.embedding(batch.token_ids, TABLE), model.gate), Activation.SILU)

    def twice(ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
        gate_up = ops.linear(ops.embedding(batch.token_ids, TABLE), model.gate)
        return ops.gate(gate_up, Activation.SILU), ops.gate(gate_up, Activation.GELU_TANH)

    batch, kv = batch_of(STEPS[0]), caches()[0]
    fused, plain = record(native, once, batch, kv), record(native, twice, batch, kv)
    assert (fused.num_steps, plain.num_steps) == (2, 4)
    assert torch.equal(fused.run(batch)[0], once(native, batch, kv))
    assert torch.equal(plain.run(batch)[0], twice(native, batch, kv)[0])
    assert torch.equal(plain.run(batch)[1], twice(native, batch, kv)[1])


def test_inputs_are_checked_before_anything_runs(native: NativeOps) -> None:
    model = SmallModel(native)
    kv = caches()[0]
    batch = with_inputs(STEPS[0], "encoder", 0)
    program = record(native, model.forward, batch, kv)
    program.run(batch)
    before = kv[0].k.clone()

    def changed(tensor: torch.Tensor, at: tuple[int, ...], value: int) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    def with_metadata(metadata: AttentionMetadata, **fields: torch.Tensor) -> tuple[AttentionMetadata, ...]:
        return (replace(metadata, **fields),)

    group, outputs = batch.metadata[0], batch.outputs
    of_encoder = batch.inputs["of_encoder"].tensor
    bad_slot, bad_block = changed(group.slot_mapping, (14,), 72), changed(group.block_table, (1, 1), 9)
    too_long = changed(group.seq_lens, (2,), 99)
    for wrong, said in (
        (replace(batch, token_ids=changed(batch.token_ids, (3,), VOCAB)), r"token_ids: element 3 is 50"),
        (replace(batch, positions=changed(batch.positions, (4,), -1)), "positions: element 4 is -1"),
        (replace(batch, outputs=replace(outputs, index=changed(outputs.index, (1,), 15))),
         "output_index: element 1 is 15"),
        (replace(batch, inputs={**batch.inputs, "of_encoder": Input(changed(of_encoder, (0,), 11), Domain.OUTPUTS)}),
         "of_encoder: element 0 is 11, allowed are 0 to 10"),
        (replace(batch, metadata=with_metadata(group, slot_mapping=bad_slot)), "token 14"),
        (replace(batch, metadata=with_metadata(group, block_table=bad_block)), "row 1"),
        (replace(batch, outputs=replace(outputs, metadata=with_metadata(outputs.metadata[0], seq_lens=too_long))),
         "row 2"),
    ):  # fmt: skip
        with pytest.raises(InvariantBroken, match=said):
            program.run(wrong)
    for wrong, said in (
        (replace(batch, token_ids=batch.token_ids.long()), "token_ids was recorded as contiguous torch.int32"),
        (replace(batch, positions=batch.positions[:-1]), "positions has 14 rows, others of its domain have 15"),
        (replace(batch, positions=torch.zeros(30, dtype=torch.int32)[::2]), "positions was recorded as contiguous"),
        (
            replace(batch, metadata=with_metadata(group, seq_lens=group.seq_lens.long())),
            "seq_lens and block_table in torch.int32",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            program.run(wrong)
    assert torch.equal(kv[0].k, before)


def test_a_batch_that_cannot_be_recorded_leaves_the_others_recorded(
    native: NativeOps, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(SmallModel):
        def forward(self, ops, batch: ForwardBatch, kv: Sequence[KVLayer]):
            x = super().forward(ops, batch, kv)
            return x * 2 if batch.num_layers == 7 else x

    model = Odd(native)
    programs = Programs(native)
    replayed = ForwardRunner(model, native, recorder=programs)  # type: ignore[arg-type]
    ours, theirs = caches()
    with caplog.at_level(logging.WARNING, logger="pagoda"):
        for num_layers in (7, 0, 7):
            batch = replace(batch_of(STEPS[0]), num_layers=num_layers)
            assert torch.equal(replayed.run(batch, ours).hidden, model.forward(native, batch, theirs))
    assert len(caplog.records) == 1
    assert replayed.program is not None
