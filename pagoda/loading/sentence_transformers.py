"""Read how sentence-transformers pools a model: modules.json and the settings next to it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingKind, PoolingPlan
from pagoda.loading.model_files import read_json_object, read_json_objects
from pagoda.models.base import DenseSpec
from pagoda.models.config_reader import ConfigReader
from pagoda.models.encoder_config import label_activation
from pagoda.ops.declare import Activation

MODULES = "modules.json"
_PACKAGE = "sentence_transformers."
_KINDS = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {
    "Tanh": Activation.TANH,
    "Identity": Activation.IDENTITY,
    "ReLU": Activation.RELU,
    "GELU": Activation.GELU,
    "SiLU": Activation.SILU,
}
_TRANSFORMER_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TASKS = ("feature-extraction", "sequence-classification")
_HARMLESS_ARGUMENTS = {"torch_dtype", "dtype", "attn_implementation", "trust_remote_code", "add_pooling_layer"}
_NO_LIMIT = 1_000_000  # tokenizers without a limit have a model_max_length far above this


@dataclass(frozen=True, slots=True)
class SentenceTransformersModules:
    """What follows the transformer.   dense: applied to the pooled states, in order."""

    plan: PoolingPlan
    dense: tuple[DenseSpec, ...]


@dataclass(frozen=True, slots=True)
class _Module:
    """An entry of modules.json.   kind: its class.   folder: of its settings, "" for the model's own."""

    kind: str
    folder: str


def read_pooling(folder: Path, default: PoolingPlan, hidden_size: int) -> SentenceTransformersModules | None:
    """Return what the folder's modules.json says; None if there is none.

    default: the plan that follows from config.json.   hidden_size: of the states that are pooled.
    Raises ConfigError that names what is not supported.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    transformer, *rest = _read_modules(path)
    if transformer.kind != "Transformer":
        raise ConfigError(f"{path}: the first module is {abbreviate(transformer.kind)}, not a Transformer")
    if transformer.folder:
        raise ConfigError(f"{path}: the Transformer is in {abbreviate(transformer.folder)}; copy its files next to it")
    plan = _with_settings(folder, replace(default, max_seq_length=_read_max_seq_length(folder)))
    if not rest:
        return SentenceTransformersModules(plan, ())
    if rest[0].kind != "Pooling":
        raise ConfigError(f"{path}: {rest[0].kind} after the Transformer is not supported; a Pooling must follow it")
    kind = _read_kind(folder / rest[0].folder / "config.json", hidden_size)
    normalize, dense = False, list[DenseSpec]()
    for module in rest[1:]:
        if normalize or module.kind not in ("Dense", "Normalize", "Dropout"):
            after = "Normalize" if normalize else "Pooling"
            raise ConfigError(f"{path}: {module.kind} after {after} is not supported")
        if module.kind == "Normalize":
            normalize = True
        elif module.kind == "Dense":
            dense.append(_read_dense(folder, module.folder, dense[-1].outputs if dense else hidden_size))
    plan = replace(plan, kind=kind, normalize=normalize, embeds=True, labels=())
    return SentenceTransformersModules(plan, tuple(dense))


def _read_modules(path: Path) -> list[_Module]:
    modules: list[_Module] = []
    for index, values in enumerate(read_json_objects(path)):
        entry = ConfigReader(values, f"{path}: module {index}")
        name, folder = entry.text("type"), entry.text("path", "")
        # Classes were moved between modules of the package; code of anyone else is not run, whatever its name.
        if not name.startswith(_PACKAGE):
            raise ConfigError(f"{entry.origin}: type {abbreviate(name)} is not a module of sentence-transformers")
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ConfigError(f"{entry.origin}: path {abbreviate(folder)} is outside of the model's folder")
        modules.append(_Module(name.rpartition(".")[2], folder))
    if not modules:
        raise ConfigError(f"{path}: no modules")
    return modules


def _read_kind(path: Path, hidden_size: int) -> PoolingKind:
    config = ConfigReader(read_json_object(path), str(path))
    for key in ("embedding_dimension", "word_embedding_dimension"):
        if config.has(key) and config.integer(key) != hidden_size:
            raise ConfigError(f"{path}: {key} = {config.integer(key)}, but the hidden states have {hidden_size}")
    if not config.flag("include_prompt", True):
        raise ConfigError(f"{path}: include_prompt = false is not supported")
    if config.has("pooling_mode"):
        stored = config.values["pooling_mode"]
        modes = stored if isinstance(stored, list) else [stored]
    else:
        modes = [mode for key, mode in _OLD_KEYS.items() if config.flag(key, False)] or ["mean"]
    if len(modes) != 1 or modes[0] not in tuple(_KINDS):  # which may be anything, also a list
        raise ConfigError(
            f"{path}: pooling_mode {', '.join(map(abbreviate, modes))} is not supported; supported: one of "
            f"{', '.join(_KINDS)}"
        )
    return _KINDS[str(modes[0])]


def _read_dense(folder: Path, name: str, inputs: int) -> DenseSpec:
    path = folder / name / "config.json"
    config = ConfigReader(read_json_object(path), str(path))
    config.refuse("use_residual")
    for key in ("module_input_name", "module_output_name"):
        config.refuse(key, "sentence_embedding")
    if config.integer("in_features") != inputs:
        raise ConfigError(f"{path}: in_features = {config.integer('in_features')}, but the layer before has {inputs}")
    if not (folder / name / "model.safetensors").is_file():
        raise ConfigError(f"{folder / name}: no model.safetensors; convert the layer's weights")
    return DenseSpec(
        folder=Path(name).as_posix(),
        inputs=inputs,
        outputs=config.integer("out_features"),
        bias=config.flag("bias", True),
        activation=_read_activation(config),
    )


def _read_activation(config: ConfigReader) -> Activation:
    stored = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    package, _, name = stored.rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise ConfigError(
            f"{config.origin}: activation_function {abbreviate(stored)} is not supported; supported are torch.nn's "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_max_seq_length(folder: Path) -> int | None:
    """Return the number of tokens after which sentence-transformers cuts a text; None if there is no limit."""
    path = next((folder / name for name in _TRANSFORMER_SETTINGS if (folder / name).is_file()), None)
    if path is not None:
        config = ConfigReader(read_json_object(path), str(path))
        config.choice("transformer_task", _TASKS, _TASKS[0])
        for key in ("model_args", "config_args", "tokenizer_args", "model_kwargs", "config_kwargs", "processor_kwargs"):
            arguments = config.section(key)
            unknown = sorted(set(arguments.values) - _HARMLESS_ARGUMENTS) if arguments else []
            if unknown:
                raise ConfigError(f"{path}: {key}: {abbreviate(unknown[0])} is not supported")
        if config.flag("do_lower_case", False) and not _lowers(folder):
            raise ConfigError(f"{path}: do_lower_case = true, but the tokenizer does not lower; that is not supported")
        if config.has("max_seq_length"):
            return config.integer("max_seq_length")
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        return None
    limit = read_json_object(tokenizer).get("model_max_length")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 1 <= limit < _NO_LIMIT:
        return None
    return int(limit)


def _lowers(folder: Path) -> bool:
    """Return whether the tokenizer itself turns letters into small ones."""
    path = folder / "tokenizer.json"
    normalizer = read_json_object(path).get("normalizer") if path.is_file() else None
    found: list[object] = [normalizer]
    for step in found:
        if isinstance(step, dict):
            if step.get("type") == "Lowercase" or step.get("lowercase") is True:
                return True
            steps = step.get("normalizers")
            found += steps if isinstance(steps, list) else []
    return False


def _with_settings(folder: Path, plan: PoolingPlan) -> PoolingPlan:
    """Return the plan with the prompts of config_sentence_transformers.json, and a cross-encoder's activation."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return plan
    config = ConfigReader(read_json_object(path), str(path))
    prompts = _read_prompts(config)
    default = config.text("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise ConfigError(f"{path}: default_prompt_name {abbreviate(default)} is not one of prompts {list(prompts)}")
    plan = replace(plan, prompts=prompts, default_prompt=default)
    if plan.labels and config.has("activation_fn"):
        plan = replace(plan, label_activation=label_activation(config.text("activation_fn"), str(path)))
    return plan


def _read_prompts(config: ConfigReader) -> Mapping[str, str]:
    section = config.section("prompts")
    if section is None:
        return {}
    # null: a name without a text
    if not all(text is None or isinstance(text, str) for text in section.values.values()):
        raise config.wrong("prompts", "strings by name")
    return {name: str(text or "") for name, text in section.values.items()}
