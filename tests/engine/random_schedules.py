"""Random schedules, and what each request got under them, to the bits of its logits."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, MediaItem, PromptEmbeds
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.executor import Executor
from pagoda.executors.in_process import InProcessExecutor
from pagoda.kernels.sampling.batch import DrawParams
from pagoda.loading.model_files import ModelFiles
from pagoda.worker.forward_runner import Graphs
from pagoda.worker.grammar_rows import GrammarMasks
from pagoda.worker.launched_steps import LaunchedStep
from pagoda.worker.model_runner import ModelRunner
from pagoda.worker.sampler import Drawn, Sampler
from pagoda.worker.speculation.drafter import Draft
from pagoda.worker.table_mirror import TableMirror
from pagoda.worker.worker import Worker
from tests.engine.driver import MAX_STEPS, request
from tests.engine.thread_ranks import ThreadRanks

FIRST_FILLER_SEED = 1_000_000
INJECTED = "as the schedule says"

ENGINE: dict[str, object] = {"kernels": "native", "device": "cpu"}
"""Options of engines to which a test gives no others. The kernels of a CPU run replayed."""


@dataclass(frozen=True)
class Watched:
    """A request whose every bit is compared. Branch b of it draws with seed + b, and by that seed it is known.

    skips_prefix: its prompt is not looked up in the prefix cache.
    embeds: in place of some tokens of its prompt, which has zeros there.
    media: pictures of its prompt, or the encoder inputs of an encoder-decoder model (crosses).
    """

    prompt: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    adapter: LoraRef | None = None
    skips_prefix: bool = False
    embeds: PromptEmbeds | None = None
    media: tuple[MediaItem, ...] = ()
    crosses: bool = False

    @property
    def encoder_len(self) -> int:
        return sum(item.length for item in self.media) if self.crosses else 0

    @property
    def num_seqs(self) -> int:
        return self.params.n if isinstance(self.params, SamplingParams) else 1

    @property
    def is_search(self) -> bool:
        return isinstance(self.params, SamplingParams) and self.params.beam_search is not None


@dataclass
class Trace:
    """What requests got, by the seed of each sequence.

    logits: (seed, position of the token that was drawn) -> digest of the logits' bits.   tokens: seed -> emitted.
    prompt_logprobs: seed -> the bytes of the prompt's columns: token ids, logprobs, ranks.
    logprobs: seed -> the bytes of each token's columns, of those that the request asked for.
    pooled: seed -> the bytes of the vector of a prompt that is pooled.
    failed: seeds of sequences that ended because a step failed as the schedule says.
    """

    logits: dict[tuple[int, int], bytes] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def clear(self) -> None:
        self.logits.clear()
        self.tokens.clear()
        self.prompt_logprobs.clear()
        self.logprobs.clear()
        self.pooled.clear()
        self.failed.clear()


class TappedSampler:
    """A Sampler that notes the bits of the logits before anything is done to them, except after a wrong draft.

    steps_fail: what was launched on top of a step that fails is drawn again, and only the last draw counts.
    """

    def __init__(self, sampler: Sampler, steps_fail: bool) -> None:
        self._sampler = sampler
        self._steps_fail = steps_fail
        self.trace = Trace()

    def draw(
        self,
        logits: torch.Tensor,
        table: TableMirror,
        rows: np.ndarray,
        positions: np.ndarray,
        masks: GrammarMasks | None,
        params: DrawParams | None,
    ) -> Drawn:
        assert logits.dtype == torch.float32
        seeds = table.seeds[rows].tolist()
        digests = [hashlib.blake2b(values, digest_size=12).digest() for values in logits.cpu().numpy()]
        drawn = self._sampler.draw(logits, table, rows, positions, masks, params)
        wrong: set[int] = set()
        draws = zip(rows.tolist(), seeds, positions.tolist(), digests, drawn.tokens.tolist(), strict=True)
        for row, seed, position, digest, token in draws:
            if seed < FIRST_FILLER_SEED and row not in wrong:
                before = self.trace.logits.get((seed, position), digest)
                assert before == digest or self._steps_fail, "drawn twice, not the same"
                self.trace.logits[seed, position] = digest
            if token != table.token_ids[row, position]:  # the draft; of a row's last draw there is none
                wrong.add(row)
        return drawn


class Foresight:
    """Drafts what sequences are known to say, of which some last tokens are wrong.

    texts: seed -> prompt and output. Nothing is drafted for other seeds.
    """

    runs_model = False

    def __init__(self, texts: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self._texts, self._vocab_size = texts, vocab_size
        self._rng = np.random.default_rng(2)

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        pass

    def propose(self, table: TableMirror, rows: np.ndarray, most: np.ndarray) -> list[Draft]:
        seeds, known = table.seeds[rows].tolist(), table.num_tokens[rows].tolist()
        each = zip(seeds, known, most.tolist(), strict=True)
        return [self._draft(self._texts.get(seed, ())[first:], count) for seed, first, count in each]

    def _draft(self, text: Sequence[int], most: int) -> Draft:
        tokens = np.array(text[: self._rng.integers(1, most + 1)], np.int32)
        num_right = self._rng.choice([len(tokens), self._rng.integers(len(tokens) + 1)])
        tokens[num_right:] = (tokens[num_right:] + 1) % self._vocab_size
        return Draft(tokens)


class StepCounter:
    """An executor that counts what the schedules made of their requests.

    It checks that what encoders read is sent once, until the output is freed, and never with a row.
    """

    def __init__(self, inner: Executor, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts
        self._sent: set[str] = set()
        self.start, self.set_pools, self.call = inner.start, inner.set_pools, inner.call
        self.shutdown = inner.shutdown

    def submit(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        counts = self._counts
        counts["steps"] += 1
        counts["most rows"] = max(counts["most rows"], len(output.rows))
        counts["chunks"] += int((output.num_new > 1).sum())
        counts["swapped in"] += len(output.swap_in)
        counts["forks"] += len(output.forks)
        counts["beams copied"] += len(output.beams.copies)
        counts["features sent"] += len(output.encoder_inputs)
        self._sent.difference_update(output.encoder_freed)
        sent = [item.content_hash for item in output.encoder_inputs]
        assert len({*sent} - self._sent) == len(sent), "features are sent again"
        assert all(item.features is not None for item in output.encoder_inputs)
        assert all(item.features is None for init in output.admitted for item in init.media)
        self._sent.update(sent)
        return self._inner.submit(output)


def fail_steps(runner: ModelRunner, numbers: Set[int]) -> None:
    """Let these steps run out of memory after their events are applied, before anything is computed."""
    submit = runner._submit

    def fail_or_submit(output: SchedulerOutput, begin_s: float) -> LaunchedStep:
        if output.step in numbers:
            raise MemoryError(INJECTED)
        return submit(output, begin_s)

    runner._submit = fail_or_submit  # type: ignore[method-assign]


def make_engine(
    model: Path | ModelFiles,
    counts: Counter[str],
    options: Mapping[str, object],
    logits: bool = True,
    failing: Set[int] = frozenset(),
) -> tuple[EngineCore, Trace]:
    """An engine with these options and those in ENGINE, and the trace it writes as it runs, with logits or without.

    Of a worker in another process there are none.   options: with `ranks_on_threads`, ranks are threads instead.
    failing: numbers of the steps that fail; of a worker in this process.
    """
    files = model if isinstance(model, ModelFiles) else None
    path = str(files.path if files else model)
    given = {**ENGINE, **options}
    on_threads = given.pop("ranks_on_threads", False)
    setup = resolve_engine(EngineConfig.from_options(model=path, **given), files)
    workers: list[Worker] = []

    def wrap(executor: Executor, max_rows: int) -> Executor:
        if on_threads:
            executor = ThreadRanks(setup)
            workers.append(executor.sampling)
        elif isinstance(executor, InProcessExecutor):
            assert isinstance(executor.worker, Worker)
            workers.append(executor.worker)
        return StepCounter(executor, counts)

    core = build_engine_core(setup, wrap_executor=wrap)
    if setup.config.parallel.executor == "mp" and not on_threads:
        return core, Trace()
    runner = workers[0]._runner
    assert runner is not None
    if given["kernels"] == "native" and not isinstance(runner._forward.recorder, Graphs):
        assert runner._forward.program is not None, "the forward is not recorded"
    if failing:
        fail_steps(runner, failing)
    if not logits:
        return core, Trace()
    tap = TappedSampler(runner._sampler, bool(failing))
    runner._sampler = tap  # type: ignore[assignment]
    return core, tap.trace


@dataclass
class Script:
    """When each of the requests arrives (a step's number), and which fillers leave early (request number -> step)."""

    requests: list[Watched]
    arrivals: list[int]
    leaves: dict[int, int]
    resets: set[int]


def play(core: EngineCore, trace: Trace, script: Script) -> None:
    """Run the script to its end; the trace has what every request got."""
    order = sorted(range(len(script.requests)), key=lambda i: script.arrivals[i])
    leaves = {step: (0, number) for number, step in script.leaves.items()}
    step = 0
    while order or core.has_unfinished_requests():
        while order and (script.arrivals[order[0]] <= step or not core.has_unfinished_requests()):
            number = order.pop(0)
            each = script.requests[number]
            added = request(number, each.prompt, each.params, each.seed)
            more = {"lora": each.adapter, "skip_prefix_read": each.skips_prefix, "prompt_embeds": each.embeds}
            added = replace(added, **more)  # type: ignore[arg-type]
            core.add_request(replace(added, media=each.media, encoder_len=each.encoder_len))
        if step in leaves:
            core.abort([leaves[step]])
        if step in script.resets:
            core.reset_prefix_cache(preempt_running=True)
        _take(core, trace, script)
        step += 1
        assert step < MAX_STEPS, "the engine makes no progress"


def _take(core: EngineCore, trace: Trace, script: Script) -> None:
    for outputs in core.step().values():
        at = 0
        for handle, sequence, count in zip(outputs.handles, outputs.sequences, outputs.counts, strict=True):
            each = script.requests[handle]
            seed = each.seed + int(sequence)
            trace.tokens.setdefault(seed, []).extend(outputs.token_ids[at : at + count].tolist())
            if isinstance(each.params, SamplingParams) and each.params.logprobs is not None and not each.is_search:
                columns, width = outputs.logprobs, 1 + each.params.logprobs
                assert columns is not None
                trace.logprobs.setdefault(seed, []).extend(
                    columns.token_ids[row, :width].tobytes() + columns.logprobs[row, :width].tobytes()
                    for row in range(at, at + count)
                )
            at += count
        for handle, told in outputs.prompt_logprobs.items():
            seed = script.requests[handle].seed
            before = trace.prompt_logprobs.get(seed, (b"", b"", b""))
            columns = (told.token_ids.tobytes(), told.logprobs.tobytes(), told.ranks.tobytes())
            trace.prompt_logprobs[seed] = tuple(old + new for old, new in zip(before, columns, strict=True))
        for handle, vector in outputs.pooled.items():
            assert script.requests[handle].seed not in trace.pooled, "pooled twice"
            trace.pooled[script.requests[handle].seed] = vector.tobytes()
        for finish in outputs.ends:
            assert finish.message in (None, f"the step failed: MemoryError: {INJECTED}"), finish.message
            if finish.message is not None:
                trace.failed.add(script.requests[finish.handle].seed + finish.sequence)


def alone(model: Path | ModelFiles, watched: Sequence[Watched], options: Mapping[str, object]) -> Trace:
    """Every sequence as a request of its own, prompts whole, one thread, one after the other, nothing cached.

    The beams of a search need each other: they are one request.
    """
    num_beams = max((each.num_seqs for each in watched if each.is_search), default=1)
    alone_options = {
        "threads": 1,
        "max_num_seqs": num_beams,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 1024,
    }
    core, trace = make_engine(model, Counter(), {**options, **alone_options})
    for each in watched:
        if each.is_search or isinstance(each.params, PoolingParams):
            play(core, trace, Script([each], [0], {}, set()))
            continue
        for sequence in range(each.num_seqs):
            params = _single(each.params)
            play(core, trace, Script([replace(each, params=params, seed=each.seed + sequence)], [0], {}, set()))
    core.shutdown()
    return trace


def _single(params: SamplingParams) -> SamplingParams:
    values = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return SamplingParams(**{**values, "n": 1})


def differences(expected: Trace, got: Trace, requests: Sequence[Watched]) -> list[str]:
    """What is not the same, of the requests that are watched: one line each. Of what failed, only its tokens so far."""
    found: list[str] = []
    for each in requests:
        if each.seed >= FIRST_FILLER_SEED:
            continue
        has_failed = each.seed in got.failed
        if not has_failed and got.pooled.get(each.seed) != expected.pooled.get(each.seed):
            found.append(f"seed {each.seed}, prompt of {len(each.prompt)}: vectors differ")
        if isinstance(each.params, PoolingParams):
            continue
        for seed in range(each.seed, each.seed + each.params.n):
            tokens = expected.tokens[seed]
            received = got.tokens.get(seed, [])
            if seed in got.failed:
                tokens = tokens[: len(received)]
            first = len(each.prompt)
            wrong = [
                position
                for position in range(first, first + len(tokens))
                if got.logits.get((seed, position)) != expected.logits.get((seed, position))
            ]
            if wrong:
                found.append(f"seed {seed}, prompt of {first}: logits differ for tokens at {wrong}")
            if received != tokens:
                found.append(f"seed {seed}: tokens {received} instead of {tokens}")
            if got.logprobs.get(seed, []) != expected.logprobs.get(seed, [])[: len(received)]:
                found.append(f"seed {seed}: logprobs differ")
        if not has_failed and got.prompt_logprobs.get(each.seed) != expected.prompt_logprobs.get(each.seed):
            found.append(f"seed {each.seed}: prompt logprobs differ")
    return found


def random_options(rng: np.random.Generator, max_model_len: int) -> dict[str, object]:
    """Settings of an engine, often with so few blocks that requests are preempted."""
    block_size = int(rng.choice([8, 16, 32]))
    least = -(-max_model_len // block_size) + 3
    num_seqs = int(rng.choice([2, 3, 16, 64, 64]))
    depth = int(rng.choice([1, 1, 2, 3]))
    mode = str(rng.choice(["mixed", "mixed", "phased"]))
    budgets = [8, 19, 64, 200, 1024] if mode == "mixed" else [max_model_len, 1024]  # phased steps take whole prompts
    return {
        "block_size": block_size,
        "num_blocks": int(least * rng.choice([1.0, 1.3, 2.0, 10.0, 10.0])),
        "num_host_blocks": int(rng.choice([0, 12, 400])),
        "preemption_mode": str(rng.choice(["auto", "recompute", "swap"])),
        "enable_prefix_caching": bool(rng.random() < 0.7),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(num_seqs, int(rng.choice(budgets))),
        "prefill": {
            "long_prefill_token_threshold": int(rng.choice([0, 0, 5, 48])),
            "prefill_beside_decodes": int(rng.choice([0, 0, 7])),
            "admit_whole_prompt": bool(rng.random() < 0.7),
        },
        "scheduling_mode": mode,
        "pipeline_depth": depth,
        "async_scheduling": depth > 1 and bool(rng.random() < 0.7),
        "threads": int(rng.choice([1, 2])),
    }


METHODS = ("ngram", "suffix", "layer_skip", "draft_model")


def random_speculation(
    rng: np.random.Generator, draft_model: str, methods: Sequence[str] = METHODS
) -> dict[str, object]:
    """Return a speculative_config, of any method; mostly one that drafts as much as it may."""
    method = str(rng.choice(methods))
    of_method: dict[str, dict[str, object]] = {
        "ngram": {"prompt_lookup_min": 1},
        "suffix": {"suffix_decoding_max_spec_factor": 4.0},
        "draft_model": {"model": draft_model},
        "layer_skip": {},
    }
    return {
        "method": method,
        "num_speculative_tokens": int(rng.integers(1, 6)),
        "adaptive": bool(rng.random() < 0.2),
        **of_method[method],
    }


def random_script(
    rng: np.random.Generator,
    watched: Sequence[Watched],
    vocab_size: int,
    most_watched: int,
    most_fillers: int,
    adapters: Sequence[LoraRef] = (),
) -> Script:
    """Some of the watched requests among strangers, in any order, at any time. Some strangers leave early.

    adapters: strangers use one of them, or none.
    """
    picked = rng.choice(len(watched), int(rng.integers(1, most_watched + 1)), replace=False)
    requests = [watched[i] for i in picked]
    for number in range(int(rng.integers(0, most_fillers + 1))):
        length = int(rng.choice([1, 9, 40, 100]))
        prompt, embeds, media = rng.integers(3, vocab_size, length).tolist(), None, ()
        if rng.random() < 0.3:  # the beginning of a watched one, which is then found in the prefix cache
            other = watched[int(rng.integers(len(watched)))]
            shared = int(rng.integers(1, len(other.prompt) + 1))
            prompt = other.prompt[:shared] + prompt[:3]
            if rng.random() < 0.7:  # otherwise it has tokens there, with which it must not be found
                embeds = (other.embeds.within(0, shared) or None) if other.embeds is not None else None
                media = tuple(one for one in other.media if one.offset + one.length <= shared)
        params = SamplingParams(temperature=float(rng.choice([0.0, 1.0])), max_tokens=int(rng.integers(1, 20)))
        which = int(rng.integers(len(adapters) + 1)) if adapters else 0
        adapter = adapters[which - 1] if which else None
        filler = Watched(prompt, params, FIRST_FILLER_SEED + number, adapter, False, embeds, media)
        if watched[0].crosses:  # some with the encoder input of another request
            other = watched[int(rng.integers(len(watched)))]
            filler = replace(filler, prompt=prompt[:20], media=other.media, crosses=True)
        requests.append(filler)
    rng.shuffle(requests)  # type: ignore[arg-type]  # a list is what it takes
    at_once = rng.random() < 0.6
    arrivals = [0 if at_once else int(rng.integers(0, 40)) for _ in requests]
    fillers = [i for i, each in enumerate(requests) if each.seed >= FIRST_FILLER_SEED]
    leaves = {i: arrivals[i] + int(rng.integers(1, 25)) for i in fillers if rng.random() < 0.3}
    resets = {int(rng.integers(1, 60))} if rng.random() < 0.2 else set()
    return Script(requests, arrivals, leaves, resets)
