"""Tensor parallelism: ranks compute what one rank computes, in the same bits whatever the batch."""

from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from pagoda.base.errors import ConfigError
from pagoda.base.ranks import RankPlace
from pagoda.core.request import LoraRef
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Matrix, Table
from pagoda.loading.adapters.files import digest_of
from pagoda.loading.model_config import read_model
from pagoda.loading.model_files import ModelFiles, identify
from pagoda.loading.shares import read_share
from tests.cached_models import cached_model
from tests.device_under_test import WITH_STATES
from tests.models.adapters import LINEAR, RowsWithAdapters, add_adapter, save_adapters
from tests.models.gguf_writer import write_gguf
from tests.models.packed_writer import Packing, write_packed
from tests.models.paged_runner import PagedRunner, generate
from tests.models.ranks import Rank, on_ranks, recorded
from tests.models.test_prompt_embeds import WithEmbeds
from tests.models.test_real_models import TEXTS, prompts_of
from tests.models.tiny import CONFIGS, VOCAB, WIDE, make_model, save
from tests.models.tiny_encoders import CONFIGS as ENCODERS
from tests.models.tiny_encoders import batch_of, make_encoder, save_encoder, texts

pytestmark = pytest.mark.usefixtures("one_thread")

Folders = Callable[..., Path]
NUM_TOKENS = 10
FOUR_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""Changes of a tiny model that has three."""
QUICK = {
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "qwen3-moe-some-layers",
    "gpt2",
    "gpt-neox",
    "gemma2",
    "phi",
    "phi3",
    "starcoder2",
    "stablelm",
    "cohere",
    "olmo2",
    "exaone4",
    "qwen2-moe",
    "glm4",
    "gpt-oss",
    "deepseek-v2-groups",
    "deepseek-v3",
    "granitemoe",
}
"""Each way to divide a layer; those below are divided in a quick run, too."""
IN_SHARED_MEMORY = ["llama-tied-biased", "gemma3", "gemma4-shared", "mixtral", "olmoe"]


def slow_except(quick: Collection[str], names: Iterable[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def divisible(name: str, **changes: Any) -> Any:
    heads = getattr(CONFIGS[name](), "num_attention_heads", 4)
    if name == "olmoe":  # its heads are as large as divide the hidden size
        changes = {"num_attention_heads": 6, "num_key_value_heads": 6, **changes}
    elif name.startswith(("gpt", "stablelm")):  # heads as large as divide the hidden size
        changes = {"num_attention_heads": 4, "hidden_size": 128, **changes}
    elif heads not in (4, 6):
        changes = {**FOUR_HEADS, **changes}
    return make_model(name, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """name -> checkpoint folder of a model that ranks can divide, made when first asked for."""
    return cache(lambda name: save(divisible(name), tmp_path_factory.mktemp(name)))


def prompts() -> list[list[int]]:
    """Mixed lengths, from one token to past every window."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (5, 1, 23, 12)]


def logits_of(rank: Rank, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    runner = PagedRunner(rank.forward, 1, 40, dtype, block_size=8)
    return torch.cat([runner.logits([(0, at, [token])]) for at, token in enumerate(prompts()[2])])


def logits_and_tokens(rank: Rank) -> tuple[torch.Tensor, list[list[int]]]:
    batch = PagedRunner(rank.forward, len(prompts()), 40, torch.float32, block_size=8)
    return logits_of(rank), generate(batch, prompts(), NUM_TOKENS, 7)


def assert_as_one(size: int, files: ModelFiles, tolerance: float = 1e-4, **load: Any) -> None:
    """Logits are near those of one rank, with equal greedy tokens; all ranks have the same bits."""
    ((expected, tokens),) = on_ranks(1, files, logits_and_tokens, **load)
    results = on_ranks(size, files, logits_and_tokens, **load)
    for logits, answers in results:
        assert torch.equal(logits, results[0][0])
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        assert answers == tokens


@pytest.mark.parametrize(
    "name",
    slow_except(QUICK, [name for name in CONFIGS if not name.startswith(WITH_STATES)]),
)
def test_two_ranks_compute_what_one_computes(name: str, folders: Folders) -> None:
    assert_as_one(2, identify(folders(name)))


@pytest.mark.parametrize("name", IN_SHARED_MEMORY)
def test_recorded_ranks_in_shared_memory_compute_what_one_computes(name: str, folders: Folders) -> None:
    assert_as_one(2, identify(folders(name)), kernels="native")


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_ranks_share_kv_heads_if_there_are_fewer(kernels: str, folders: Folders) -> None:
    assert_as_one(4, identify(folders("qwen3")), kernels=kernels)


@pytest.mark.slow
def test_real_weights_are_divided() -> None:
    """Gemma 3 has four query heads and one KV head, which all ranks share."""
    files = cached_model("gemma3-270m")
    texts = prompts_of(files, TEXTS[:5])

    def compute(rank: Rank) -> tuple[torch.Tensor, list[list[int]]]:
        runner = PagedRunner(rank.forward, len(texts), 64, torch.float32, block_size=16)
        answers = generate(runner, texts, 12, 8)
        assert recorded(rank)
        alone = PagedRunner(rank.forward, len(texts), 64, torch.float32, block_size=16)
        return alone.logits([(row, 0, text) for row, text in enumerate(texts)]), answers

    ((expected, tokens),) = on_ranks(1, files, compute, "native", quantization="none")
    for logits, answers in on_ranks(2, files, compute, "native", quantization="none"):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert answers == tokens


FORMS: dict[str, tuple[str, Any]] = {
    "int8": ("llama-tied-biased", "int8"),
    "int8 experts": ("mixtral", "int8"),
    "gguf F16": ("llama", Kind.F16),
    "gguf Q8_0": ("llama-tied-biased", Kind.Q8_0),
    "gguf Q4_0 experts": ("mixtral", Kind.Q4_0),
    "gguf Q4_1": ("gemma3", Kind.Q4_1),
    "gguf Q4_K": ("llama", Kind.Q4_K),
    "gguf Q6_K": ("qwen3", Kind.Q6_K),
    "awq": ("llama", Packing("awq")),
    "awq, a row per group": ("qwen2", Packing("awq", group=-1)),
    "gptq": ("llama", Packing("gptq", group=128)),
    "gptq, a row per group": ("llama", Packing("gptq", group=-1, symmetric=True)),
    "gptq in the order of activations": ("llama", Packing("gptq", group=128, ordered=True)),
    "w8a8": (
        "llama",
        Packing("compressed-tensors", group=-1, symmetric=True, bits=8, stored="int-quantized"),
    ),
    "w4a16": ("qwen3", Packing("compressed-tensors", group=64)),
    "fp8 in blocks": ("llama", Packing("fp8", block=(64, 128))),
    "gptq experts": ("qwen3-moe-renormalized", Packing("gptq", keep=("mlp.gate",))),
}
QUICK_FORMS = {
    "int8",
    "int8 experts",
    "gguf F16",
    "gguf Q8_0",
    "gguf Q4_0 experts",
    "gguf Q4_K",
    "awq",
    "gptq in the order of activations",
    "w8a8",
    "w4a16",
    "fp8 in blocks",
}


def form(name: str, how: Any, folder: Path) -> tuple[ModelFiles, str | None]:
    """Write a checkpoint in a form; return it and the setting that keeps the form in memory."""
    more = {"moe_intermediate_size": 256} if name.startswith("qwen3-moe") else {}
    model = divisible(name, **{**WIDE, **more})
    if isinstance(how, Kind):
        write_gguf(model, folder / "model.gguf", how)
        return identify(folder / "model.gguf"), None if how is Kind.F16 else "gguf"
    save(model, folder / "floats")
    if how == "int8":
        return identify(folder / "floats"), "int8"
    write_packed(folder / "floats", how, folder / "packed", folder / "values")
    return identify(folder / "packed"), None


@pytest.mark.parametrize("case", slow_except(QUICK_FORMS, FORMS))
def test_weights_of_every_form_are_divided(case: str, tmp_path: Path) -> None:
    """On kernels that multiply the values of codes, then on those that multiply codes with inputs of 8 bits."""
    files, quantization = form(*FORMS[case], tmp_path)
    assert_as_one(2, files, quantization=quantization)
    (expected,) = on_ranks(1, files, logits_of, "native", quantization=quantization)
    # In the order of activations, a rank's part of a group is rounded with other inputs than the whole of it.
    tolerance = 0.04 if getattr(FORMS[case][1], "ordered", False) else 0.02
    for logits in on_ranks(2, files, logits_of, "native", quantization=quantization):
        assert (logits - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_and_their_heads_are_divided(name: str, kernels: str, tmp_path: Path) -> None:
    config = ENCODERS[name]()
    config.num_attention_heads = 6
    rows = texts(5, 1, 130, 23)

    def states(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = rank.forward.run(batch_of(rows, rank.forward.model.num_token_types), []).hidden.clone()
        return hidden, rank.forward.classify(hidden[:4])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENCODERS, name, lambda: config)
        files = identify(save_encoder(make_encoder(name, "classifier"), tmp_path))
    (expected,) = on_ranks(1, files, states, kernels)
    for result in on_ranks(2, files, states, kernels):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


ADAPTERS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"r": 4, "target_modules": [*LINEAR, "embed_tokens", "lm_head"]}, {"r": 40, "use_rslora": True}],
    "llama-tied-biased": [{"r": 8, "lora_bias": True, "target_modules": ["q_proj", "o_proj", "down_proj", "up_proj"]}],
    "gemma3": [{"r": 8, "target_modules": [*LINEAR, "embed_tokens", "lm_head"]}],
    "olmoe": [{"r": 8, "target_modules": ["k_proj", "o_proj"]}],
    "gpt-neox": [{"r": 8, "lora_bias": True, "target_modules": ["query_key_value", "dense"]}],
}


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_divided_as_the_layers_are(name: str, kernels: str, folders: Folders, tmp_path: Path) -> None:
    theirs: Any = divisible(name)
    for index, config in enumerate(ADAPTERS[name]):
        theirs = add_adapter(theirs, f"a{index}", seed=index, **config)
    adapters = save_adapters(theirs, tmp_path)
    refs = [LoraRef(name, str(folder), digest_of(folder)) for name, folder in adapters.items()]

    def logits(rank: Rank) -> torch.Tensor:
        for ref in refs:
            rank.store.load(ref)
        slots = [0, *(rank.store.acquire(ref) for ref in refs)]
        rows: Any = RowsWithAdapters(rank.forward, slots)
        runner = PagedRunner(rows, len(slots), 40, torch.float32, block_size=8)
        found = runner.logits([(row, 0, prompts()[2][: 9 + row]) for row in range(len(slots))])
        assert kernels != "native" or recorded(rank)
        return found

    files = identify(folders(name))
    (expected,) = on_ranks(1, files, logits, kernels)
    for found in on_ranks(2, files, logits, kernels):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.1


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_prompts_may_be_embeddings(kernels: str, folders: Folders) -> None:
    embeds = torch.randn(23, 96, generator=torch.Generator().manual_seed(2))

    def logits(rank: Rank) -> torch.Tensor:
        rows: Any = WithEmbeds(rank.forward, lambda batch: (torch.arange(3, 20), embeds[3:20]))
        return PagedRunner(rows, 1, 40, torch.float32, block_size=8).logits([(0, 0, prompts()[2])])

    files = identify(folders("llama"))
    (expected,) = on_ranks(1, files, logits, kernels)
    for found in on_ranks(2, files, logits, kernels):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3", "mixtral"])
def test_bits_do_not_depend_on_the_batch_or_on_chunks(name: str, folders: Folders) -> None:
    """In bfloat16, on the native kernels."""
    prompt = prompts()[2]

    def logits(rank: Rank) -> list[torch.Tensor]:
        alone = PagedRunner(rank.forward, 1, 40, torch.bfloat16, block_size=8)
        found = [alone.logits([(0, 0, prompt)])[0]]
        for chunk in (1, 5, 8):
            runner = PagedRunner(rank.forward, 4, 40, torch.bfloat16, block_size=8)
            for at in range(0, len(prompt), chunk):
                others = [(row, at, prompts()[0][:1]) for row in range(1, 4)]
                last = runner.logits([*others, (0, at, prompt[at : at + chunk])])[-1]
            found.append(last)
        assert recorded(rank)
        return found

    ranks = on_ranks(2, identify(folders(name)), logits, "native", torch.bfloat16)
    for found in (one for rank in ranks for one in rank):
        assert torch.equal(found, ranks[0][0])


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("llama", 3, r"tensor_parallel_size=3 does not divide the 4 heads of q_proj; sizes that divide it: 1, 2, 4$"),
        ("olmoe", 2, r"does not divide the 3 heads of q_proj; sizes that divide it: 1, 3$"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    name: str, size: int, message: str, tmp_path: Path
) -> None:
    files = identify(save(divisible(name) if name == "llama" else make_model(name), tmp_path))
    with pytest.raises(ConfigError, match=message):
        read_share(files, None, RankPlace(0, size))


def test_sizes_that_would_cut_quantisation_groups_are_refused_with_those_that_do(tmp_path: Path) -> None:
    files, quantization = form("qwen3", Kind.Q6_K, tmp_path)
    with pytest.raises(
        ConfigError, match=r"cut the quantisation groups of 256 in o_proj .*sizes that divide it: 1, 2$"
    ):
        read_share(files, quantization, RankPlace(0, 4))


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_share_and_ranks_together_hold_all(size: int, folders: Folders) -> None:
    files = identify(folders("qwen3"))
    shares = [read_share(files, None, RankPlace(rank, size)) for rank in range(size)]
    whole = dict(parameters(read_model(files)))
    for (path, parameter), *others in zip(*(parameters(share) for share in shares), strict=True):
        if not isinstance(parameter.declared, Matrix | Table):
            continue
        held = sum(
            rows * columns for rows, columns in (one.shard.shape for one in (parameter, *(o for _, o in others)))
        )
        rows, columns = whole[path].shard.shape
        if path.endswith("qkv.weight") and size == 4:  # two KV heads for four ranks
            assert held > rows * columns
        else:
            assert held == rows * columns, path
