"""Each architecture, as a tiny random checkpoint, answers what transformers answers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedModel

from pagoda.loading.loader import load_model
from pagoda.loading.model_files import identify
from pagoda.models.llama import Llama
from pagoda.worker.forward_runner import ForwardRunner
from tests.device_under_test import DeviceUnderTest
from tests.models.paged_runner import PagedRunner, generate
from tests.models.tiny import CONFIGS, LONGROPE, VOCAB, greedy, make_model, save

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """name -> checkpoint folder, made when first asked for."""

    @cache
    def folder(name: str) -> Path:
        return save(reference(name), tmp_path_factory.mktemp(name))

    return folder


@cache
def reference(name: str) -> PreTrainedModel:
    return make_model(name)


def load(
    folder: Path,
    on: DeviceUnderTest,
    kernels: str = "torch",
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
) -> ForwardRunner:
    ops = on.ops(kernels)
    return ForwardRunner(load_model(identify(folder), ops, dtype, on.device, quantization), ops)


def prompts() -> list[list[int]]:
    """Mixed lengths, from one token to past every window."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (5, 1, 23, 12)]


@cache
def expected(name: str) -> list[list[int]]:
    with torch.inference_mode():
        return [greedy(reference(name), prompt, NUM_TOKENS) for prompt in prompts()]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal(name: str, folders, on: DeviceUnderTest):
    """Of prompts in chunks."""
    on.must_compute(name)
    runner = PagedRunner(load(folders(name), on), len(prompts()), 40, torch.float32, device=on.device)
    assert generate(runner, prompts(), NUM_TOKENS, 7) == expected(name)


QUICK = {"llama", "mixtral-window", "gpt2", "gemma3", "gemma4-shared", "gpt-oss", "deepseek-v3", "lfm2", "llama4"}
"""Ways to attend: in windows or chunks, to sinks, to K and V of other layers, to latents; and to go on from a state."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_greedy_tokens_equal_in_every_chunking(name: str, folders, on: DeviceUnderTest):
    on.must_compute(name)
    model = load(folders(name), on)
    for chunk in (1, 3, 64):
        runner = PagedRunner(model, len(prompts()), 40, torch.float32, device=on.device)
        assert generate(runner, prompts(), NUM_TOKENS, chunk) == expected(name), f"chunk {chunk}"


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "gemma3-softcap-scaled",
        "gemma4-shared",
        "deepseek-v2-groups",
        "deepseek-v3",
        "lfm2-biased",
        "qwen3-next",
        "qwen3.5-attention-last",
        "llama4",
        "llama4-dense-layers",
    ],
)
def test_greedy_tokens_equal_on_other_kernels(name: str, kernels: str, folders, on: DeviceUnderTest):
    if kernels != "reference":
        on.must_compute(name)
    model = load(folders(name), on, kernels)
    runner = PagedRunner(model, len(prompts()), 40, torch.float32, block_size=8, device=on.device)
    assert generate(runner, prompts(), NUM_TOKENS, 9) == expected(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_close(name: str, folders, on: DeviceUnderTest):
    on.must_compute(name)
    prompt = prompts()[2]
    runner = PagedRunner(load(folders(name), on), 1, 40, torch.float32, device=on.device)
    ours = torch.cat([runner.logits([(0, at, [token])]) for at, token in enumerate(prompt)])
    theirs = reference(name)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gemma_4_is_read_from_a_checkpoint_with_towers(tmp_path: Path, on: DeviceUnderTest):
    """Their weights are left out."""
    config = transformers.Gemma4Config(
        text_config=CONFIGS["gemma4"]().to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8},
        audio_config=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Gemma4ForConditionalGeneration(config).float().eval()
    runner = PagedRunner(load(save(theirs, tmp_path), on), 1, 40, torch.float32, device=on.device)
    ours = runner.logits([(0, 0, prompts()[2])])[0]
    torch.testing.assert_close(ours, theirs(torch.tensor([prompts()[2]])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_mistral_4_is_read_from_a_checkpoint_with_a_tower(tmp_path: Path, on: DeviceUnderTest):
    """It is the one that Mistral Small 3.1 and Ministral 3 have: see test_vision_towers.py."""
    on.must_compute("mistral4")
    config = transformers.Mistral3Config(
        text_config=CONFIGS["mistral4"]().to_dict(),
        vision_config={"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                       "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14},
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    runner = PagedRunner(load(save(theirs, tmp_path), on), 1, 40, torch.float32, device=on.device)
    ours = runner.logits([(0, 0, prompts()[2])])[0]
    torch.testing.assert_close(ours, theirs(torch.tensor([prompts()[2]])).logits[0, -1], rtol=1e-4, atol=1e-4)


_SMALL_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 96}


@pytest.mark.parametrize("are_stacked", [False, True])
def test_qwen3_5_is_read_from_a_checkpoint_with_a_tower(are_stacked: bool, tmp_path: Path, on: DeviceUnderTest):
    """Its weights are left out. Experts may be stored one by one, or stacked as the publisher has them."""
    on.must_compute("qwen3.5")
    text = CONFIGS["qwen3.5-moe"]().to_dict()
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=_SMALL_TOWER)
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5MoeForConditionalGeneration(config).float().eval()
    save(theirs, tmp_path)
    if are_stacked:
        save_file(
            {name: tensor.clone() for name, tensor in theirs.state_dict().items()}, tmp_path / "model.safetensors"
        )
    runner = PagedRunner(load(tmp_path, on), 1, 40, torch.float32, device=on.device)
    ours = runner.logits([(0, 0, prompts()[2])])[0]
    torch.testing.assert_close(ours, theirs(torch.tensor([prompts()[2]])).logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
        ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
        ("phi3", {"sliding_window": 7, "tie_word_embeddings": True, "hidden_act": "relu2"}),
        ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
        ("gpt-neox", {"use_parallel_residual": False, "hidden_act": "gelu_new", "attention_bias": False}),
    ],
    ids=str,
)
def test_settings_of_a_family_are_followed(name: str, changes: dict[str, Any], tmp_path: Path, on: DeviceUnderTest):
    theirs = make_model(name, **changes)
    runner = PagedRunner(load(save(theirs, tmp_path), on), 1, 40, torch.float32, device=on.device)
    ours = runner.logits([(0, 0, prompts()[2])])[0]
    torch.testing.assert_close(ours, theirs(torch.tensor([prompts()[2]])).logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_token_past_the_last_learned_position_is_computed_and_not_an_error(
    kernels: str, tmp_path: Path, on: DeviceUnderTest
):
    """As a step in flight may: its row has ended, and nothing reads the result."""
    theirs, ops = make_model("gpt2", n_positions=16), on.ops(kernels)
    model = load_model(identify(save(theirs, tmp_path)), ops, torch.float32, on.device, num_positions=18)
    runner = PagedRunner(ForwardRunner(model, ops), 2, 24, torch.float32, block_size=8, device=on.device)
    prompt = prompts()[2][:16]
    ours = runner.logits([(0, 0, prompt), (1, 0, prompt)])
    expected = theirs(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(ours[0], expected, rtol=1e-4, atol=1e-4)
    runner.logits([(0, 16, [5, 6])])
    torch.testing.assert_close(runner.logits([(1, 15, prompt[15:])])[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("max_model_len", "prompt"), [(16, 3), (64, 2)])
def test_longrope_follows_the_longest_sequence_that_may_come(
    max_model_len: int, prompt: int, tmp_path: Path, on: DeviceUnderTest
):
    """transformers goes by the length of each sequence; it agrees about those that are as long as the choice says."""
    theirs, ops = make_model("phi3", **LONGROPE), on.ops("torch")
    model = load_model(
        identify(save(theirs, tmp_path)), ops, torch.float32, on.device, num_positions=70, max_model_len=max_model_len
    )
    runner = PagedRunner(ForwardRunner(model, ops), 1, 40, torch.float32, device=on.device)
    ours = runner.logits([(0, 0, prompts()[prompt])])[0]
    torch.testing.assert_close(ours, theirs(torch.tensor([prompts()[prompt]])).logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gemma3", "gemma4-shared", "lfm2", "qwen3-next", "qwen3.5"]
)
def test_bf16_stays_near_fp32(name: str, folders, on: DeviceUnderTest):
    """As near as transformers' own bfloat16, times two."""
    prompt = prompts()[2]
    exact = reference(name)(torch.tensor([prompt])).logits[0, -1]
    rounded = make_model(name).bfloat16()(torch.tensor([prompt])).logits[0, -1].float()
    model = load(folders(name), on, dtype=torch.bfloat16)
    runner = PagedRunner(model, 1, 40, torch.bfloat16, device=on.device)
    ours = runner.logits([(0, 0, prompt)])[0]
    assert (ours - exact).norm() <= 2 * (rounded - exact).norm()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_hidden_states_close_layer_by_layer(name: str, folders, on: DeviceUnderTest):
    """A model cut after n layers ends like transformers' n-th hidden state, normed."""
    prompt = prompts()[3]
    theirs = reference(name)
    states = theirs(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    run = load(folders(name), on)
    model = run.model
    assert isinstance(model, Llama)
    all_layers = model.model.layers
    for count in range(1, len(all_layers)):
        model.model.layers = all_layers[:count]
        ours = PagedRunner(run, 1, 40, torch.float32, device=on.device).hidden([(0, 0, prompt)])
        torch.testing.assert_close(ours[0], theirs.model.norm(states[count])[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_int8_stays_near_fp32(kernels: str, folders, on: DeviceUnderTest):
    """Linear layers in 8-bit groups: close to the model, and not the same."""
    prompt = prompts()[2]
    model = load(folders("llama-tied-biased"), on, kernels, quantization="int8")
    runner = PagedRunner(model, 1, 40, torch.float32, block_size=8, device=on.device)
    ours = runner.logits([(0, 0, prompt)])[0]
    exact = reference("llama-tied-biased")(torch.tensor([prompt])).logits[0, -1]
    assert 0 < (ours - exact).norm() < 0.05 * exact.norm()
