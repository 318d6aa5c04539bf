"""LoRA adapters of models that pool: vectors and classes are those of PEFT, next to rows with none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel

from pagoda.assembly.assemble import build_engine_core, resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingParams
from pagoda.core.request import LoraRef
from pagoda.loading.adapters.files import AdapterTargets, check_adapter, digest_of
from pagoda.loading.model_config import read_architecture, read_model
from pagoda.loading.model_files import identify
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import drive, request
from tests.engine.test_pooling import saved
from tests.models.adapters import LINEAR, add_adapter, save_adapters
from tests.models.tiny_encoders import make_encoder, save_encoder, texts

PROMPTS = texts(5, 1, 23, 12, 40, 9)
BERT = ["query", "value", "dense"]
MODERN = ["Wqkv", "Wi", "Wo"]


def adapted(name: str, head: str, folder: Path, configs: list[dict[str, object]]) -> PeftModel:
    """A tiny random model with adapters a0, a1, ..., saved as transformers and PEFT do."""
    base: Any
    if name in ("bert", "roberta", "modernbert"):
        base = make_encoder(name, head)
        save_encoder(base, folder / "model")
    else:
        kind = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
        base = saved(name, folder / "model", kind, **({"num_labels": 3, "pad_token_id": 0} if head else {}))
    theirs: PeftModel | None = None
    for index, config in enumerate(configs):
        theirs = add_adapter(theirs or base, f"a{index}", seed=index, **config)
    assert theirs is not None
    return theirs


def result_of(model: PeftModel, prompt: list[int], head: str) -> np.ndarray:
    with torch.inference_mode():
        output = model(torch.tensor([prompt]))
    return output.logits[0].numpy() if head else output.last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    ("name", "head", "configs"),
    [
        (
            "bert",
            "",
            [
                {"r": 4, "target_modules": r".*(query|word_embeddings|attention\.output\.dense|intermediate\.dense)"},
                {"r": 17, "target_modules": ["key"]},
            ],
        ),
        ("bert", "", [{"r": 4, "target_modules": BERT}]),  # "dense" is also the pooler's, which no result depends on
        ("bert", "classifier", [{"r": 4, "target_modules": [*BERT, "classifier"]}]),
        ("roberta", "tokens", [{"r": 8, "target_modules": ["value", "classifier"]}]),
        ("modernbert", "", [{"r": 4, "target_modules": MODERN}, {"r": 40, "target_modules": ["Wqkv"]}]),
        ("modernbert", "classifier", [{"r": 4, "target_modules": [*MODERN, "dense", "classifier"]}]),
        ("qwen3", "", [{"r": 16}, {"r": 3, "target_modules": ["q_proj"]}]),
        ("llama", "classifier", [{"r": 16, "target_modules": [*LINEAR, "score"]}]),
    ],
)
def test_results_are_those_of_peft(
    tmp_path: Path, name: str, head: str, configs: list[dict[str, object]], on: DeviceUnderTest
) -> None:
    theirs = adapted(name, head, tmp_path, configs)
    folders = save_adapters(theirs, tmp_path / "adapters")
    refs = {each: LoraRef(each, str(folder), digest_of(folder)) for each, folder in folders.items()}
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "num_blocks": 60, "block_size": 8}
    options |= {"enable_lora": True, "max_lora_rank": 40, "max_num_seqs": 8}
    task = {"": "token_embed", "tokens": "token_classify", "classifier": "classify"}[head]
    params = PoolingParams(task=task, use_activation=False)  # type: ignore[arg-type]
    choices = [None, *refs]
    users = [choices[number % len(choices)] for number in range(2 * len(PROMPTS))]
    config = EngineConfig.from_options(model=str(tmp_path / "model"), **on.engine(options))
    core = build_engine_core(resolve_engine(config))
    requests = [
        replace(request(number, PROMPTS[number // 2], params), lora=refs[user] if user else None)
        for number, user in enumerate(users)
    ]
    answers = drive(core, requests)
    core.shutdown()
    for number, user in enumerate(users):
        prompt = PROMPTS[number // 2]
        if user is None:
            with theirs.disable_adapter():
                want = result_of(theirs, prompt, head)
        else:
            theirs.set_adapter(user)
            want = result_of(theirs, prompt, head)
        np.testing.assert_allclose(answers.pooled[f"r{number}"], want, atol=3e-5, rtol=3e-5)
    with theirs.disable_adapter():
        plain = result_of(theirs, PROMPTS[0], head)
    for user in refs:
        theirs.set_adapter(user)
        assert np.abs(result_of(theirs, PROMPTS[0], head) - plain).max() > 0.01, "the adapter changes nothing"


def test_an_adapter_of_nothing_that_vectors_depend_on_is_refused(tmp_path: Path) -> None:
    folder = save_adapters(adapted("bert", "", tmp_path, [{"target_modules": ["pooler.dense"]}]), tmp_path)["a0"]
    files = identify(tmp_path / "model")
    targets = AdapterTargets(read_architecture(files)[0], read_model(files))
    with pytest.raises(ConfigError, match="no tensors of a LoRA adapter of this model"):
        check_adapter(folder, targets, 40)
