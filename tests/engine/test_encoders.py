"""Encoder-only models through the engine: vectors and scores of their libraries, and the same bits in any schedule."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.assembly.assemble import build_engine_core, resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.pooling import PoolingKind, PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import RequestStatus
from pagoda.llm import LLM
from tests.cached_models import cached_model
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import Answers, request
from tests.models.tiny_encoders import make_encoder, save_encoder, texts

LENGTHS = (5, 1, 130, 23, 300, 64, 17, 2, 90, 200, 33, 7)
SENTENCES = [
    "The cat sits on the mat.",
    "A feline is resting on a rug.",
    "Stock markets fell sharply on Tuesday after the central bank raised its rates.",
    "¿Dónde está la biblioteca? 東京, 👩‍🚀",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "Photosynthesis converts light into chemical energy. " * 20,
]


def scheduled(
    on: DeviceUnderTest, folder: Path, params: list[PoolingParams], chooser: random.Random | None, **options: object
) -> Answers:
    """The results of LENGTHS' texts. chooser: picks when each arrives, and what is aborted next to them."""
    given = on.engine({"dtype": "float32", "device": "cpu", **options})
    config = EngineConfig.from_options(model=str(folder), **given)
    core = build_engine_core(resolve_engine(config))
    waiting = [
        request(number, row, given) for number, (row, given) in enumerate(zip(texts(*LENGTHS), params, strict=True))
    ]
    extra = [request(100 + number, row, params[0]) for number, row in enumerate(texts(50, 3, 299, seed=5))]
    if chooser is not None:
        waiting += extra
        chooser.shuffle(waiting)
    answers, ids = Answers(), {each.handle: each.request_id for each in (*waiting, *extra)}
    names = [ids.get(handle, "") for handle in range(110)]
    while waiting or core.has_unfinished_requests():
        count = len(waiting) if chooser is None else chooser.randint(0, 4)
        for each in waiting[:count]:
            core.add_request(each)
        if chooser is not None and chooser.random() < 0.2:
            core.abort([(0, 100 + chooser.randrange(3))])
        del waiting[:count]
        for outputs in core.step().values():
            answers.take(outputs, names)
    core.shutdown()
    return answers


EMBEDDINGS = [
    PoolingParams(task="embed"),
    PoolingParams(task="embed", normalize=True, dimensions=7),
    PoolingParams(task="token_embed"),
    PoolingParams(task="embed", pair_start=1),
]
CLASSES = [
    PoolingParams(task="classify"),
    PoolingParams(task="token_classify"),
    PoolingParams(task="token_classify", use_activation=False),
]


@pytest.mark.parametrize(
    ("name", "head", "tasks"),
    [("bert", "", EMBEDDINGS), ("modernbert", "", EMBEDDINGS), ("modernbert", "classifier", CLASSES)],
)
def test_random_schedules_change_no_bit(
    on: DeviceUnderTest, tmp_path: Path, name: str, head: str, tasks: list[PoolingParams]
) -> None:
    """Whatever runs beside a text, in whatever steps, on whatever number of threads; of several tasks at once."""
    on.must_promise_bits()
    save_encoder(make_encoder(name, head), tmp_path)
    params = [tasks[number % len(tasks)] for number in range(len(LENGTHS))]
    alone = scheduled(on, tmp_path, params, None, max_num_seqs=1, threads=1)
    assert len(alone.pooled) == len(LENGTHS)
    for seed in range(3):
        chooser = random.Random(seed)
        found = scheduled(
            on,
            tmp_path,
            params,
            chooser,
            max_num_seqs=chooser.choice((2, 5, 64)),
            max_num_batched_tokens=chooser.choice((320, 400, 2048)),
            async_scheduling=chooser.random() < 0.5,
            threads=chooser.choice((1, 2)),
        )
        for number in range(len(LENGTHS)):
            assert found.pooled[f"r{number}"].tobytes() == alone.pooled[f"r{number}"].tobytes(), (seed, number)
            assert found.finishes[f"r{number}", 0].status is RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_a_class_per_token(on: DeviceUnderTest, tmp_path: Path, name: str) -> None:
    model = make_encoder(name, "tokens")
    save_encoder(model, tmp_path)
    params = [PoolingParams(task="token_classify", use_activation=number % 2 == 0) for number in range(len(LENGTHS))]
    found = scheduled(on, tmp_path, params, None, threads=1)
    for number, row in enumerate(texts(*LENGTHS)):
        with torch.inference_mode():
            logits = model(torch.tensor([row])).logits[0]
        want = logits.softmax(-1) if number % 2 == 0 else logits
        np.testing.assert_allclose(found.pooled[f"r{number}"], want.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling_type", ["cls", "last", "mean"])
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_poolings(on: DeviceUnderTest, tmp_path: Path, name: str, pooling_type: str) -> None:
    model = make_encoder(name)
    save_encoder(model, tmp_path)
    params = [PoolingParams(task="embed")] * len(LENGTHS)
    found = scheduled(on, tmp_path, params, None, pooling_type=pooling_type, threads=1)
    take = {PoolingKind.CLS: lambda x: x[0], PoolingKind.LAST: lambda x: x[-1], PoolingKind.MEAN: lambda x: x.mean(0)}
    for number, row in enumerate(texts(*LENGTHS)):
        with torch.inference_mode():
            states = model(torch.tensor([row])).last_hidden_state[0]
        want = take[PoolingKind(pooling_type)](states).numpy()
        np.testing.assert_allclose(found.pooled[f"r{number}"], want, atol=1e-5, rtol=1e-5)


def test_minilm_embeds_as_sentence_transformers_does(on: DeviceUnderTest) -> None:
    from sentence_transformers import SentenceTransformer

    files = cached_model("minilm-l6")
    with LLM(model="minilm-l6", **on.engine({"dtype": "float32", "threads": 1})) as llm:
        outputs = llm.embed(SENTENCES, truncate_prompt_tokens=-1, use_tqdm=False)
        with pytest.raises(RequestError, match="does not support generate"):
            llm.generate("Hello", SamplingParams(max_tokens=1))
        (similarity,) = llm.score(SENTENCES[0], SENTENCES[1], use_tqdm=False)
    ours = np.array([output.outputs.embedding for output in outputs])
    model = SentenceTransformer(str(files.path), device="cpu")
    theirs = model.encode(SENTENCES)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(similarity.outputs.score, theirs[0] @ theirs[1], atol=1e-5)


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_a_cross_encoder_scores_as_sentence_transformers_does(
    on: DeviceUnderTest, tmp_path: Path, activation: str
) -> None:
    """Random weights, MiniLM's tokenizer: the second text has token type 1."""
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    files = cached_model("minilm-l6")
    path = f"torch.nn.modules.{'activation' if activation == 'Sigmoid' else 'linear'}.{activation}"
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, num_labels=1,
        sentence_transformers={"activation_fn": path, "version": "5.0.0"}, initializer_range=0.2,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(files.path / name, tmp_path / name)
    pairs = [(SENTENCES[0], other) for other in SENTENCES[1:5]]
    with LLM(model=str(tmp_path), **on.engine({"threads": 1})) as llm:
        together = [output.outputs.score for output in llm.score(SENTENCES[0], SENTENCES[1:5], use_tqdm=False)]
        alone = [llm.score(*pair, use_tqdm=False)[0].outputs.score for pair in pairs]
        with pytest.raises(RequestError, match="does not support embed"):
            llm.embed(SENTENCES[0])
    assert together == alone
    theirs = CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    np.testing.assert_allclose(together, theirs, atol=1e-5)
    assert len({round(score, 4) for score in together}) == len(pairs)


def test_settings_that_an_encoder_cannot_have(tmp_path: Path) -> None:
    save_encoder(make_encoder("bert"), tmp_path)
    for option in ("enable_prefix_caching", "enable_chunked_prefill"):
        with pytest.raises(ConfigError, match=f"{option}: the tokens of this model attend to the whole prompt"):
            resolve_engine(EngineConfig.from_options(model=str(tmp_path), **{option: True}))
    setup = resolve_engine(EngineConfig.from_options(model=str(tmp_path)))
    assert setup.groups == ()
    assert not setup.tasks.generates
