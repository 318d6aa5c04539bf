"""Pipeline parallelism: stages that are threads of one process compute what one rank computes, bit for bit."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.sizing import size_cache, weights_in_memory
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.ranks import WHOLE, RankPlace
from pagoda.kernels.collectives.group import Communicator, ThreadGroup, thread_groups
from pagoda.kernels.collectives.shared_memory import shared_groups
from pagoda.kernels.native_ops import NativeOps
from pagoda.layers.module import parameters
from pagoda.layers.sharding import ALONE
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.ops.tensor import RankGroup
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.device_under_test import ON_CPU
from tests.models.paged_runner import PagedRunner, generate
from tests.models.tiny import VOCAB, make_model, save
from tests.models.tiny_encoders import make_encoder, save_encoder

pytestmark = pytest.mark.usefixtures("one_thread")

Folder = Callable[..., Path]
Work = list[tuple[int, int, list[int]]]
FOUR_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a model's checkpoint folder, made when first asked for."""

    @cache
    def made(name: str, four_heads: bool = False) -> Path:
        return save(make_model(name, **(FOUR_HEADS if four_heads else {})), tmp_path_factory.mktemp(name))

    return made


def load(files: ModelFiles, kernels: str, place: RankPlace = WHOLE, ranks: RankGroup = ALONE) -> ForwardRunner:
    ops = ON_CPU.ops(kernels)
    model = load_model(files, ops, torch.float32, torch.device("cpu"), ranks=ranks, place=place)
    return ForwardRunner(model, ops, recorder=Programs(ops) if isinstance(ops, NativeOps) else None)


def groups_of(kernels: str, size: int, stages: int) -> Sequence[Communicator]:
    """Return a group for each rank: the definition, or that of the native kernels."""
    ops = ON_CPU.ops(kernels)
    if isinstance(ops, NativeOps):
        return shared_groups(ops.library, size, stages, deadline_s=60)
    return thread_groups(size, stages, deadline_s=60)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (5, 1, 23, 12)]


def paged(runner: ForwardRunner) -> PagedRunner:
    return PagedRunner(runner, len(prompts()), 40, torch.float32, block_size=8)


def steps_of(runner: ForwardRunner) -> list[Work]:
    """Return steps that mix chunks of prompts with decodes, as a model that is whole computes them."""
    steps: list[Work] = []
    whole = paged(runner)

    class Noted:
        def logits(self, work: Work) -> torch.Tensor:
            steps.append([(row, start, list(tokens)) for row, start, tokens in work])
            return whole.logits(work)

    generate(Noted(), prompts(), 6, 7)  # type: ignore[arg-type]
    return steps


def on_ranks(files: ModelFiles, kernels: str, size: int, stages: int, steps: list[Work]) -> list[Any]:
    """Return the logits of each step on each rank, by the number of the rank; None where it has none."""

    def run(number: int, ranks: Communicator) -> Any:
        with torch.inference_mode():
            try:
                model = load(files, kernels, RankPlace.of(number, size, stages), ranks)
                runner = paged(model)
                found = [runner._run(work, None).logits for work in steps]
                assert kernels != "native" or model.program is not None, "the stage is not recorded"
                return [None if logits is None else logits.clone() for logits in found]
            except BaseException as error:
                if isinstance(ranks, ThreadGroup):
                    ranks.abort(str(error))
                raise

    groups = groups_of(kernels, size, stages)
    with ThreadPoolExecutor(len(groups)) as threads:
        return [done.result() for done in [threads.submit(run, number, group) for number, group in enumerate(groups)]]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied-biased",
        "qwen3",
        "gemma3",
        "qwen3-moe",
        "olmoe",
        "gpt2",
        "olmo2",
        "granite",
        "gemma4",
        "llama4",
        "lfm2",
        "mamba2",
        "falcon-h1",
        "qwen3.5",
        "nemotron-h",
    ],
)
def test_stages_compute_the_bits_of_one_rank(name: str, kernels: str, folder: Folder) -> None:
    files = identify(folder(name))
    with torch.inference_mode():
        steps = steps_of(load(files, kernels))
    (whole,) = on_ranks(files, kernels, 1, 1, steps)
    for stages in (2, 3):
        *before, last = on_ranks(files, kernels, 1, stages, steps)
        assert all(logits is None for results in before for logits in results)
        for logits, expected in zip(last, whole, strict=True):
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_stages_of_two_ranks_compute_the_bits_of_one_stage_of_two(kernels: str, folder: Folder) -> None:
    files = identify(folder("llama", True))
    with torch.inference_mode():
        steps = steps_of(load(files, kernels))
    whole = on_ranks(files, kernels, 2, 1, steps)
    *_, first, second = on_ranks(files, kernels, 2, 2, steps)
    for expected, one, other in zip(whole[0], first, second, strict=True):
        assert torch.equal(one, expected)
        assert torch.equal(other, expected)


def test_a_stage_reads_and_holds_its_layers_only(folder: Folder) -> None:
    files = identify(folder("llama"))
    held: list[list[str]] = []
    for stage in range(2):
        model = load(files, "torch", RankPlace(stage=stage, num_stages=2)).model
        held.append([path for path, _ in parameters(model)])
        assert [group.layers for group in model.kv_groups] == [(0,) if stage == 0 else (0, 1)]
    assert {path.split(".")[2] for path in held[0] if ".layers." in path} == {"0"}
    assert {path.split(".")[2] for path in held[1] if ".layers." in path} == {"1", "2"}
    assert "model.embed_tokens.weight" in held[0]
    assert not {"model.norm.weight", "lm_head.weight"} & set(held[0])
    assert "model.embed_tokens.weight" not in held[1]
    assert {"model.norm.weight", "lm_head.weight"} <= set(held[1])


def test_the_last_stage_holds_a_tied_embedding_too(folder: Folder) -> None:
    files = identify(folder("llama-tied-biased"))
    for stage in range(3):
        model = load(files, "torch", RankPlace(stage=stage, num_stages=3)).model
        assert ("model.embed_tokens.weight" in dict(parameters(model))) == (stage != 1)


def test_blocks_of_a_stage_are_as_small_as_its_layers(folder: Folder) -> None:
    """Six layers with a window and one without, in groups of one: each stage divides its own among the same tables."""
    files = identify(folder("gemma3"))
    whole = load(files, "torch").model.kv_groups
    for stage in range(2):
        groups = load(files, "torch", RankPlace(stage=stage, num_stages=2)).model.kv_groups
        assert [(group.kind, group.window) for group in groups] == [(group.kind, group.window) for group in whole]
        layers = sorted(layer for group in groups for layer in group.layers)
        assert layers == list(range(len(layers)))
        assert max(len(group.layers) for group in groups) <= max(len(group.layers) for group in whole)


def test_more_stages_than_layers_are_refused(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the 3 layers"):
        load(identify(folder("llama")), "torch", RankPlace(num_stages=4))


def test_layers_that_read_what_another_stage_has_are_refused(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: a model with num_kv_shared_layers = 3 cannot"):
        load(identify(folder("gemma4-shared")), "torch", RankPlace(num_stages=2))


def test_a_rank_is_planned_with_the_layers_of_its_stage(folder: Folder) -> None:
    """Its weights and its blocks are smaller than those of the whole model, before anything is loaded."""
    common = {"model": str(folder("llama")), "dtype": "float32", "kv_cache_memory": 1 << 20, "device": "cpu"}
    whole, staged = (
        resolve_engine(EngineConfig.from_options(**common, pipeline_parallel_size=stages))  # type: ignore[arg-type]
        for stages in (1, 3)
    )
    assert weights_in_memory(staged) < 0.6 * weights_in_memory(whole)
    one, three = size_cache(whole), size_cache(staged)
    assert three.block_bytes == one.block_bytes / 3
    assert three.num_blocks > 2.9 * one.num_blocks


def test_an_engine_refuses_more_stages_than_layers(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the 3 layers"):
        resolve_engine(EngineConfig.from_options(model=str(folder("llama")), pipeline_parallel_size=4, device="cpu"))


def test_encoders_have_no_stages_and_the_error_says_what_they_have(tmp_path: Path) -> None:
    options = {"model": str(save_encoder(make_encoder("bert"), tmp_path)), "device": "cpu"}
    with pytest.raises(ConfigError) as caught:
        resolve_engine(EngineConfig.from_options(**options, pipeline_parallel_size=3))  # type: ignore[arg-type]
    assert "pipeline_parallel_size=3: models of architecture 'bert' cannot be divided into stages" in str(caught.value)
    assert "take tensor_parallel_size=3" in str(caught.value)
    assert resolve_engine(EngineConfig.from_options(**options, tensor_parallel_size=3))  # type: ignore[arg-type]
