"""Steps that are launched before the results of earlier ones are on the host; the device is made up."""

import weakref
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.sampling_params import OutputRule, SamplingParams
from pagoda.core.scheduler_output import RowFork
from pagoda.kernels import transfer as transfer_module
from pagoda.kernels.reference_ops import ReferenceOps
from pagoda.kernels.torch_ops import TorchOps
from pagoda.worker import sampler as sampler_module
from pagoda.worker.cache_engine import CacheEngine
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.table_mirror import TableMirror
from tests.worker.hand_made import GREEDY, VOCAB, PagedSumModel, expected_next, i32, row_init, step
from tests.worker.lagging_device import LaggingDevice
from tests.worker.sync_watch import SyncWatch

CPU = torch.device("cpu")
BLOCK = 4


def make(
    broken_token: int = -1, ops: Any = None, grammars: GrammarRows | None = None
) -> tuple[ModelRunner, TableMirror, LaggingDevice]:
    model = PagedSumModel(broken_token)
    device = LaggingDevice()
    cache = CacheEngine(model.kv_groups, BLOCK, 60, 10, torch.float32, device)
    table = TableMirror(8, 64, BLOCK, 1)
    forward = ForwardRunner(cast(Any, model), ops or cast(Any, TorchOps()))
    return ModelRunner(forward, table, cache, device, grammars=grammars), table, device


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_next(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_tokens_reach_the_next_steps_before_the_host(depth: int) -> None:
    run, table, device = make()
    a, b = [3, 1, 4, 1, 5], [9, 2]
    admitted = (row_init(0, a, [1, 2, 3, 4, 5]), row_init(5, b, [6, 7, 8, 9, 10]))
    steps = [run.launch(step(1, [(0, 0, 3), (5, 0, 2)], [(5, 1)], admitted=admitted))]
    steps.append(run.launch(step(2, [(0, 3, 2), (5, 2, 1)])))  # a prompt's end next to a token in flight
    got: list[Any] = []
    for number in range(3, 12):
        while len(steps) - len(got) >= depth:
            got.append(steps[len(got)].result())
        steps.append(run.launch(step(number, [(5, number, 1), (0, 2 + number, 1)])))
        assert device.num_waits == len(got)  # launching does not wait
    got += [later.result() for later in steps[len(got) :]]
    of_b = [int(got[0].sampled[0, 0]), int(got[1].sampled[1, 0])] + [int(out.sampled[0, 0]) for out in got[2:]]
    of_a = [int(got[1].sampled[0, 0])] + [int(out.sampled[1, 0]) for out in got[2:]]
    assert of_b == continued(b, 11)
    assert of_a == continued(a, 10)
    assert table.token_ids[0, :15].tolist() == a + of_a
    assert [out.step for out in got] == list(range(1, 12))


def test_a_late_token_is_not_written_to_the_next_sequence_of_its_row() -> None:
    run, table, device = make()
    first = run.launch(step(1, [(2, 0, 3)], admitted=(row_init(2, [3, 1, 4], [1]),)))
    second = run.launch(step(2, [(2, 3, 1)]))
    # The request is aborted while its tokens are in flight, and another one gets its row.
    other = row_init(2, [7, 8, 9, 6], [2])
    third = run.launch(step(3, [(2, 0, 2)], [], released=i32(2), admitted=(other,)))
    assert device.num_waits == 0
    assert [first.result().sampled[0, 0], second.result().sampled[0, 0]] == continued([3, 1, 4], 2)
    assert table.token_ids[2, :4].tolist() == [7, 8, 9, 6]
    fourth = run.launch(step(4, [(2, 2, 2)]))
    assert fourth.result().sampled[0, 0] == expected_next([7, 8, 9, 6])
    assert third.result().num_sampled.size == 0


def test_a_result_brings_those_of_earlier_steps() -> None:
    run, table, _ = make()
    prompt = [3, 1, 4]
    steps = [run.launch(step(1, [(0, 0, 3)], admitted=(row_init(0, prompt, [1, 2]),)))]
    steps += [run.launch(step(2 + k, [(0, 3 + k, 1)])) for k in range(3)]
    assert steps[3].result().sampled[0, 0] == continued(prompt, 4)[3]
    assert all(each.is_done() for each in steps)
    assert table.num_tokens[0] == 7
    assert [int(each.result().sampled[0, 0]) for each in steps] == continued(prompt, 4)


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        (SamplingParams(temperature=0, presence_penalty=0.5), True),
        (SamplingParams(temperature=0, bad_words_token_ids=((5, 6),)), True),
        (SamplingParams(temperature=0, min_tokens=9), False),
        (SamplingParams(temperature=0, logit_bias=((5, 3.0),)), False),
        (SamplingParams(temperature=0.8, top_p=0.9, logprobs=2), False),
    ],
)
def test_the_host_waits_where_it_reads_tokens(params: SamplingParams, waits: bool) -> None:
    results = []
    for ahead in (False, True):
        run, _, device = make()
        rows = [(0, 0, 3), (1, 0, 2)]
        admitted = (row_init(0, [3, 1, 4], [1, 2, 3], params, eos=(0,)), row_init(1, [8, 8], [4, 5, 6]))
        steps = [run.launch(step(1, rows, admitted=admitted))]
        for number in range(2, 7):
            if not ahead:
                steps[-1].result()
            steps.append(run.launch(step(number, [(0, 1 + number, 1), (1, number, 1)])))
        assert device.num_waits == (5 if waits or not ahead else 0)
        results.append([each.result() for each in steps])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one.sampled, other.sampled)
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert np.array_equal(one.logprobs.logprobs, other.logprobs.logprobs)


class ForcedFifth:
    """A grammar whose fifth token is 1, and its matcher: it says that the first four, and those after it, are free."""

    error, is_grammars_fault = "", False

    def __init__(self) -> None:
        self.num_taken = 0

    @property
    def num_free(self) -> int:
        return 4 - self.num_taken if self.num_taken <= 4 else 99

    def advance(self, token_ids: Any) -> None:
        self.num_taken += len(token_ids)

    def matcher(self, rule: OutputRule) -> "ForcedFifth":
        return ForcedFifth()

    def fill(self, work: Any, masks: np.ndarray) -> None:
        for one in work:
            masks[one.first] = 2 if one.matcher.num_taken == 4 else -1

    def shutdown(self) -> None:
        pass


def test_the_host_waits_only_where_a_grammar_must_read_tokens() -> None:
    run, table, device = make(grammars=GrammarRows(cast(Any, ForcedFifth()), VOCAB))
    params = SamplingParams(temperature=0).with_grammar("any")
    steps = [run.launch(step(1, [(0, 0, 3)], admitted=(row_init(0, [3, 1, 4], [1, 2, 3, 4], params, eos=(0,)),)))]
    waits = [device.num_waits]
    for number in range(2, 10):
        steps.append(run.launch(step(number, [(0, 1 + number, 1)])))
        waits.append(device.num_waits)
    assert waits[:4] == [0, 0, 0, 0]
    assert waits[4] > 0  # in front of the fifth token
    assert waits[6:] == [waits[5]] * 3  # once it has seen that token, it needs no other
    steps[-1].result()
    prompt, output = [3, 1, 4], table.token_ids[0, 3:12].tolist()
    expected = continued(prompt, 4)
    assert output == [*expected, 1, *continued([*prompt, *expected, 1], 4)]
    run.shutdown()


def test_a_fork_of_a_row_in_flight_has_its_tokens() -> None:
    run, _, _ = make()
    prompt = [3, 1, 4]
    run.launch(step(1, [(0, 0, 3)], admitted=(row_init(0, prompt, [1, 2]),)))
    run.launch(step(2, [(0, 3, 1)]))
    fork = run.launch(step(3, [(0, 4, 1)], [(0, 0), (1, 0)], forks=(RowFork(0, 1, 1, 1),)))
    assert fork.result().sampled[:, 0].tolist() == [continued(prompt, 3)[2]] * 2


def test_rows_that_are_not_finite_fail_when_their_results_come() -> None:
    run, _, _ = make(broken_token=expected_next([3, 1, 4]))
    admitted = (row_init(0, [3, 1, 4], [1, 2]), row_init(1, [8, 8], [3, 4]))
    steps = [run.launch(step(1, [(0, 0, 3), (1, 0, 2)], admitted=admitted))]
    steps += [run.launch(step(2 + k, [(0, 3 + k, 1), (1, 2 + k, 1)])) for k in range(2)]
    results = [each.result() for each in steps]
    assert results[0].failed == {}
    assert set(results[1].failed) == {0}
    assert results[1].num_sampled.tolist() == [0, 1]
    assert [int(results[0].sampled[1, 0]), *(int(out.sampled[1, 0]) for out in results[1:])] == continued([8, 8], 3)


def test_an_error_of_the_device_is_raised_by_its_own_step() -> None:
    run, _, _ = make()
    first = run.launch(step(1, [(0, 0, 3)], admitted=(row_init(0, [3, 1, 4], [1, 2]),)))
    second = run.launch(step(2, [(0, 3, 1)]))

    def breaks() -> list[np.ndarray]:
        raise RuntimeError("an illegal memory access")

    first.copy.wait = breaks  # type: ignore[method-assign]
    assert second.result().step == 2
    with pytest.raises(RuntimeError, match="illegal memory"):
        first.result()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_failed_device_ends_the_worker_whatever_shows_it(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library says in words of its own what went wrong in an earlier step; too little memory is one step's error."""
    run, _, device = make()
    first = run.launch(step(1, [(0, 0, 3)], admitted=(row_init(0, [3, 1, 4], [1, 2]),)))
    kept: list[weakref.ref[torch.Tensor]] = []

    def fails(*_: object) -> torch.Tensor:
        large = torch.zeros(1000)
        kept.append(weakref.ref(large))
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access")

    def is_dead() -> None:
        raise WorkerDied("the GPU failed")

    if is_broken:
        monkeypatch.setattr(device, "check", is_dead)
    monkeypatch.setattr(run._forward.model, "compute_logits", fails)
    with pytest.raises(WorkerDied if is_broken else RuntimeError) as raised:
        run.launch(step(2, [(0, 3, 1)]))
    assert raised.value.__traceback__ is not None
    assert kept[0]() is None  # the error does not keep what the step had computed

    monkeypatch.setattr(first.copy, "wait", fails)
    with pytest.raises(WorkerDied if is_broken else RuntimeError):
        first.result()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays each copy to the device has had."""
    found: list[int] = []
    real = transfer_module.to_device

    def counted(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        found.append(len(arrays))
        return real(arrays, device)

    modules: list[Any] = [transfer_module, sampler_module]
    if find_spec("triton") is not None:
        from pagoda.kernels.sampling import triton_sampling

        modules.append(triton_sampling)
    for module in modules:
        monkeypatch.setattr(module, "to_device", counted)
    return found


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, top_k=20), None])
def test_no_step_waits_for_the_device_and_each_copies_its_inputs_at_once(
    params: SamplingParams | None, copies: list[int]
) -> None:
    """params: None mixes both kinds of row."""
    ops: Any = TorchOps()
    if params is not GREEDY:
        if find_spec("triton") is None:
            pytest.skip("torch's sampling waits for the device; Triton's is not installed")
        from pagoda.kernels.triton_ops import TritonOps

        ops = TritonOps(64)
    run, _, device = make(ops=ops)
    watch = SyncWatch()
    for name in ("forward", "compute_logits"):  # the model is a test's, and reads what it is given
        setattr(run._forward.model, name, watch.within(getattr(run._forward.model, name)))
    for name in ("select_rows", "sample", "best_tokens"):
        setattr(ops, name, watch.within(getattr(ops, name)))
    of_rows = [GREEDY, SamplingParams(temperature=1.2)] if params is None else [params, params]
    prompts = [[3, 1, 4], [8, 8]]
    admitted = tuple(
        row_init(row, prompt, range(1 + 4 * row, 5 + 4 * row), of_rows[row], seed=row)
        for row, prompt in enumerate(prompts)
    )
    first = step(1, [(0, 0, 3), (1, 0, 2)], admitted=admitted)
    with watch:
        steps = [run.launch(first)]
        steps += [run.launch(step(2 + k, [(0, 3 + k, 1), (1, 2 + k, 1)])) for k in range(6)]
    assert device.num_waits == 0
    assert len(copies) == len(steps)
    tokens = [each.result().sampled[:, 0].tolist() for each in steps]
    alone, _, _ = make(ops=TorchOps())
    again = [alone.run(first).sampled[:, 0].tolist()]
    again += [alone.run(step(2 + k, [(0, 3 + k, 1), (1, 2 + k, 1)])).sampled[:, 0].tolist() for k in range(6)]
    assert tokens == again
    assert all(0 <= token < VOCAB for of_step in tokens for token in of_step)


def test_constraints_travel_in_one_copy_and_rows_with_logprobs_in_another(copies: list[int]) -> None:
    pytest.importorskip("triton")
    from pagoda.kernels.triton_ops import TritonOps

    params = SamplingParams(
        temperature=0,
        logit_bias=((5, 1.5),),
        allowed_token_ids=tuple(range(60)),
        min_tokens=9,
        max_tokens=20,
        stop_token_ids=(7,),
        logprobs=2,
    )
    ops: Any = TritonOps(64)
    admitted = (row_init(0, [3, 1, 4], [1, 2], params), row_init(1, [8, 8], [5, 6]))
    steps = [step(1, [(0, 0, 3), (1, 0, 2)], admitted=admitted)]
    steps += [step(2 + k, [(0, 3 + k, 1), (1, 2 + k, 1)]) for k in range(4)]
    run, _, device = make(ops=ops)
    launched = [run.launch(each) for each in steps]
    assert device.num_waits == 0
    assert len(copies) == 3 * len(steps)
    alone, _, _ = make(ops=ReferenceOps())
    for each, output in zip(launched, steps, strict=True):
        ours, theirs = each.result(), alone.run(output)
        assert ours.sampled.tolist() == theirs.sampled.tolist()
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        # The third id is one of two with the same logit, and only the Triton ops promise the lower one.
        assert ours.logprobs.token_ids[:, :2].tolist() == theirs.logprobs.token_ids[:, :2].tolist()
        torch.testing.assert_close(ours.logprobs.logprobs, theirs.logprobs.logprobs)
        assert ours.logprobs.ranks.tolist() == theirs.logprobs.ranks.tolist()


def test_the_watch_sees_what_waits() -> None:
    tensor = torch.arange(3)
    waits = [
        lambda: tensor.sum().item(),
        lambda: bool(tensor[0] == 0),
        lambda: tensor.cpu(),
        lambda: tensor.to("cpu"),
        lambda: tensor[tensor > 1],
        lambda: tensor[np.array([1])],
        lambda: tensor.tolist(),
    ]
    watch = SyncWatch()
    for wait in waits:
        with watch, pytest.raises(AssertionError):
            wait()
        with watch, watch.allowed():
            wait()
    with watch:
        assert tensor.to(torch.int32).dtype == torch.int32
