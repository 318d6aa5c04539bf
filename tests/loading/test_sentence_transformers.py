"""modules.json and the settings next to it: what they mean, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.loading.sentence_transformers import SentenceTransformersModules, read_pooling
from pagoda.ops.declare import Activation

HIDDEN = 96
OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
DENSE = {"in_features": HIDDEN, "out_features": 32, "bias": True}


def write(folder: Path, *modules: str, new: bool = False, **files: object) -> Path:
    """A folder with modules.json; their folders are `0`, `1`, ..., the first module's is the model's own.

    files: contents by name, `_1` standing for `/config.json` in the folder `1`.
    """
    entries = [
        {"idx": at, "name": str(at), "path": str(at) if at else "", "type": NEW[name] if new else OLD + name}
        for at, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for name, content in files.items():
        path = folder / name[1:] / "config.json" if name[0] == "_" else folder / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    for at, name in enumerate(modules):
        if name == "Dense":
            (folder / str(at) / "model.safetensors").write_bytes(b"")
    return folder


def read(folder: Path, default: PoolingPlan | None = None) -> SentenceTransformersModules:
    found = read_pooling(folder, default or PoolingPlan(), HIDDEN)
    assert found is not None
    return found


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder)
    return str(caught.value)


def test_a_folder_without_modules(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, PoolingPlan(), HIDDEN) is None


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode": "mean"}, PoolingKind.MEAN),
        ({"pooling_mode": ["lasttoken"], "embedding_dimension": HIDDEN}, PoolingKind.LAST),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingKind.CLS),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": HIDDEN}, PoolingKind.LAST),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, PoolingKind.CLS),
        ({"include_prompt": True}, PoolingKind.MEAN),
    ],
)
def test_pooling_modes(tmp_path: Path, config: object, kind: PoolingKind, new: bool) -> None:
    for modules, normalize in ((("Transformer", "Pooling"), False), (("Transformer", "Pooling", "Normalize"), True)):
        found = read(write(tmp_path, *modules, new=new, _1=config), PoolingPlan(embeds=False, labels=("a", "b")))
        assert found == SentenceTransformersModules(PoolingPlan(kind, normalize), ())


def test_dense_layers(tmp_path: Path) -> None:
    first = DENSE | {"activation_function": "torch.nn.modules.linear.Identity", "bias": False, "use_residual": False}
    second = {"in_features": 32, "out_features": 8, "module_input_name": "sentence_embedding"}
    modules = ("Transformer", "Pooling", "Dense", "Dropout", "Dense", "Normalize")
    found = read(write(tmp_path, *modules, _1={}, _2=first, _4=second))
    assert [(layer.folder, layer.inputs, layer.outputs, layer.bias, layer.activation) for layer in found.dense] == [
        ("2", HIDDEN, 32, False, Activation.IDENTITY),
        ("4", 32, 8, True, Activation.TANH),
    ]
    assert found.plan.normalize


def test_settings_next_to_it(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": None}
    folder = write(
        tmp_path, "Transformer", "Pooling", _1={},
        sentence_bert_config={"max_seq_length": 77, "do_lower_case": False, "transformer_task": "feature-extraction"},
        config_sentence_transformers={"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"},
    )  # fmt: skip
    plan = read(folder).plan
    assert plan.max_seq_length == 77
    assert (plan.prompts, plan.default_prompt) == ({"query": "query: ", "document": ""}, "query")


@pytest.mark.parametrize(("limit", "read_as"), [(512, 512), (1e30, None), (None, None)])
def test_the_tokenizers_limit(tmp_path: Path, limit: object, read_as: int | None) -> None:
    """Newer folders keep the longest text there."""
    folder = write(
        tmp_path, "Transformer", "Pooling", _1={}, sentence_bert_config={"max_seq_length": None},
        tokenizer_config={"model_max_length": limit},
    )  # fmt: skip
    assert read(folder).plan.max_seq_length == read_as


def test_a_cross_encoder_keeps_its_head(tmp_path: Path) -> None:
    folder = write(
        tmp_path, "Transformer", new=True, sentence_bert_config={"transformer_task": "sequence-classification"},
        config_sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
    )  # fmt: skip
    default = PoolingPlan(PoolingKind.CLS, False, False, ("LABEL_0",), "sigmoid")
    assert read(folder, default).plan == replace(default, label_activation="identity")


def test_lower_case_where_the_tokenizer_does_it(tmp_path: Path) -> None:
    lowers = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "BertNormalizer", "lowercase": True}]}
    for normalizer, fits in ((lowers, True), ({"type": "NFC"}, False), (None, False)):
        folder = write(
            tmp_path, "Transformer", "Pooling", _1={}, sentence_bert_config={"do_lower_case": True},
            tokenizer={"normalizer": normalizer},
        )  # fmt: skip
        if fits:
            read(folder)
        else:
            assert "do_lower_case = true, but the tokenizer does not lower" in refusal(folder)


@pytest.mark.parametrize(
    ("modules", "files", "said"),
    [
        (["Transformer", "WeightedLayerPooling"], {}, "WeightedLayerPooling after the Transformer is not supported"),
        (["Transformer", "Normalize"], {}, "Normalize after the Transformer"),
        (["StaticEmbedding"], {}, "the first module is 'StaticEmbedding'"),
        (["Transformer", "Pooling", "LSTM"], {"_1": {}}, "LSTM after Pooling is not supported"),
        (["Transformer", "Pooling", "Normalize", "Dense"], {"_1": {}, "_3": {}}, "Dense after Normalize is not"),
        (["Transformer", "Pooling"], {"_1": {"pooling_mode": "max"}}, "pooling_mode 'max' is not supported; supported"),
        (["Transformer", "Pooling"], {"_1": {"pooling_mode": ["cls", "mean"]}}, "pooling_mode 'cls', 'mean'"),
        (["Transformer", "Pooling"], {"_1": {"pooling_mode": 3}}, "pooling_mode 3"),
        (["Transformer", "Pooling"], {"_1": {"pooling_mode": [["cls"]]}}, "pooling_mode ['cls']"),
        (["Transformer", "Pooling"], {"_1": {"pooling_mode": {"cls": True}}}, "pooling_mode {'cls': True}"),
        (["Transformer", "Pooling"], {"_1": {"pooling_mode_max_tokens": True}}, "pooling_mode 'max'"),
        (["Transformer", "Pooling"], {"_1": {"include_prompt": False}}, "include_prompt = false is not supported"),
        (["Transformer", "Pooling"], {"_1": {"embedding_dimension": 7}}, "embedding_dimension = 7, but the hidden"),
        (["Transformer", "Pooling", "Dense"], {"_1": {}, "_2": DENSE | {"in_features": 7}}, "in_features = 7, but"),
        (["Transformer", "Pooling", "Dense"], {"_1": {}, "_2": DENSE | {"use_residual": True}}, "use_residual = True"),
        (
            ["Transformer", "Pooling", "Dense"],
            {"_1": {}, "_2": DENSE | {"module_input_name": "token_embeddings"}},
            "module_input_name = 'token_embeddings'",
        ),
        (
            ["Transformer", "Pooling", "Dense"],
            {"_1": {}, "_2": DENSE | {"activation_function": "mine.Tanh"}},
            "activation_function 'mine.Tanh' is not supported",
        ),
        (
            ["Transformer", "Pooling"],
            {"_1": {}, "sentence_bert_config": {"transformer_task": "fill-mask"}},
            "transformer_task 'fill-mask' is not supported",
        ),
        (
            ["Transformer", "Pooling"],
            {"_1": {}, "sentence_bert_config": {"config_args": {"num_hidden_layers": 2}}},
            "config_args: 'num_hidden_layers' is not supported",
        ),
        (
            ["Transformer", "Pooling"],
            {"_1": {}, "config_sentence_transformers": {"default_prompt_name": "query"}},
            "default_prompt_name 'query' is not one of prompts",
        ),
        (
            ["Transformer", "Pooling"],
            {"_1": {}, "config_sentence_transformers": {"prompts": {"query": 3}}},
            "expected strings by name",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, modules: list[str], files: dict[str, object], said: str
) -> None:
    assert said in refusal(write(tmp_path, *modules, **files))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "no modules"),
        ({}, "expected a JSON list of objects"),
        ([1], "expected a JSON list of objects"),
        ([{"path": ""}], "'type' is missing"),
        ([{"type": "custom_st.Transformer", "path": ""}], "'custom_st.Transformer' is not a module of sentence-tr"),
        ([{"type": OLD + "Transformer", "path": "../other"}], "'../other' is outside of the model's folder"),
        ([{"type": OLD + "Transformer", "path": "0_Transformer"}], "the Transformer is in '0_Transformer'"),
    ],
)
def test_hostile_module_lists(tmp_path: Path, entries: object, said: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    assert said in refusal(tmp_path)


def test_dense_weights_that_are_pickled(tmp_path: Path) -> None:
    folder = write(tmp_path, "Transformer", "Pooling", "Dense", _1={}, _2=DENSE)
    (folder / "2" / "model.safetensors").unlink()
    assert "no model.safetensors; convert the layer's weights" in refusal(folder)
