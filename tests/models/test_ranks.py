"""Tensor parallelism, op by op: ranks that are threads of one process compute what one rank computes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.kernels.collectives.group import thread_groups
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import DeviceUnderTest
from tests.models.paged_runner import PagedRunner, generate
from tests.models.tiny import CONFIGS, VOCAB, make_model, save

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
DIVISIBLE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
"""Changes of a tiny model that has three heads."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """name -> checkpoint folder, made when first asked for."""

    @cache
    def folder(name: str) -> Path:
        heads = CONFIGS[name]()
        changes = {} if getattr(heads, "num_attention_heads", 4) in (4, 6) else DIVISIBLE
        return save(make_model(name, **changes), tmp_path_factory.mktemp(name))

    return folder


def prompts() -> list[list[int]]:
    """Mixed lengths, from one token to past every window."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (5, 1, 23, 12)]


def on_ranks(size: int, compute: Callable[[ForwardRunner], Any], files: ModelFiles, kernels: str, **load: Any) -> list:
    """Return what each of the ranks computes, each with a tree of its own, on a thread of its own."""

    def run(ranks: Any) -> Any:
        with torch.inference_mode():
            try:
                ops = load["on"].ops(kernels)
                model = load_model(
                    files, ops, load.get("dtype", torch.float32), torch.device("cpu"), load.get("quantization"),
                    ranks=ranks,
                )  # fmt: skip
                return compute(ForwardRunner(model, ops))
            except BaseException as error:
                ranks.abort(str(error))
                raise

    with ThreadPoolExecutor(size) as threads:
        return [done.result() for done in [threads.submit(run, ranks) for ranks in thread_groups(size)]]


def logits_and_tokens(runner: ForwardRunner) -> tuple[torch.Tensor, list[list[int]]]:
    prompt = prompts()[2]
    alone = PagedRunner(runner, 1, 40, torch.float32, block_size=8)
    logits = torch.cat([alone.logits([(0, at, [token])]) for at, token in enumerate(prompt)])
    batch = PagedRunner(runner, len(prompts()), 40, torch.float32, block_size=8)
    return logits, generate(batch, prompts(), NUM_TOKENS, 7)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_compute_what_one_computes(name: str, folders, on: DeviceUnderTest) -> None:
    files = identify(folders(name))
    ((expected, tokens),) = on_ranks(1, logits_and_tokens, files, "torch", on=on)
    results = on_ranks(2, logits_and_tokens, files, "torch", on=on)
    for logits, answers in results:
        assert torch.equal(logits, results[0][0]), "ranks disagree"
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert answers == tokens
