"""Load a model's tokenizer from its folder, its GGUF file or an override."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.tokenizers.gguf_tokenizer import chat_templates, load_gguf_tokenizer
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, bos_eos_template, library_failure, make_facts
from pagoda.loading.ctranslate2 import END_TOKEN
from pagoda.loading.gguf_file import open_gguf
from pagoda.loading.model_files import ModelFiles, exists, identify, read_json_object
from pagoda.models.config_reader import ConfigReader


def load_tokenizer(
    files: ModelFiles,
    tokenizer_override: str | None = None,
    chat_template: str | None = None,
) -> LibraryTokenizer:
    """Load a model's tokenizer from its tokenizer.json, or rebuild it from a GGUF file's metadata.

    tokenizer_override: a local folder, tokenizer.json or .gguf file to use instead of the model's own.
    chat_template: a template's text, or the path of a file with it, to use instead of the model's own.
    Raises ConfigError that says what is missing or unsupported.
    """
    source = files.path
    if tokenizer_override is not None:
        source = Path(tokenizer_override).expanduser()
        if not exists(source):
            raise ConfigError(f"tokenizer {abbreviate(tokenizer_override)}: {shorten(str(source))} does not exist")
    template_text = _read_chat_template(chat_template) if chat_template is not None else None
    if source.suffix == ".gguf":
        return load_gguf_tokenizer(source, template_text)
    folder = source if source.is_dir() else source.parent
    if not (folder / "tokenizer.json").is_file():
        if tokenizer_override is not None and source.is_dir() and any(source.glob("*.gguf")):
            return load_gguf_tokenizer(identify(source).path, template_text)
        raise ConfigError(
            f"model {files.name!r}: {folder} has no tokenizer.json; copy the model's there, "
            "or name another tokenizer (option tokenizer)"
        )
    names = {"eos_token": END_TOKEN} if files.format == "ctranslate2" else {}
    return load_folder_tokenizer(folder, template_text, names)


def has_chat_template(files: ModelFiles, tokenizer_override: str | None = None) -> bool:
    """Return whether a model, or the tokenizer used in its place, has a chat template. Loads neither.

    Raises ConfigError for files that cannot be read.
    """
    source = files.path if tokenizer_override is None else Path(tokenizer_override).expanduser()
    if source.is_dir() and not (source / "tokenizer.json").is_file() and any(source.glob("*.gguf")):
        source = identify(source).path
    if source.suffix == ".gguf":
        return chat_templates(open_gguf(source)) is not None
    folder = source if source.is_dir() else source.parent
    return bool(_folder_chat_template(folder, _read_json(folder / "tokenizer_config.json")))


def _read_chat_template(given: str) -> str:
    """Return the template's text: `given` itself if it has braces or several lines, else the file of that path."""
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else shorten(str(error))
        raise ConfigError(
            f"chat_template={abbreviate(given)} is neither a template nor a readable file: {why}"
        ) from None


def _read_template_file(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


# ---- a folder with tokenizer.json, tokenizer_config.json and related files


def load_folder_tokenizer(
    folder: Path, chat_template: str | None = None, known_names: Mapping[str, str] | None = None
) -> LibraryTokenizer:
    """Load the tokenizer of `folder`, which has a tokenizer.json; `chat_template` replaces the folder's own.

    known_names: texts of bos_token, eos_token, ... that no file of the folder states.

    Raises ConfigError that names the unusable file.
    """
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        raise library_failure(error, path, "cannot be read as a tokenizer") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    try:
        _add_configured_tokens(backend, config)
        if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
            _apply_bos_and_eos_flags(backend, config)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'tokenizer_config.json'}: {error}") from None
    names = {**(known_names or {}), **_special_token_texts(config, _read_json(folder / "special_tokens_map.json"))}
    eos = _ids_of(folder, backend, names.get("eos_token"))
    bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    template = chat_template if chat_template is not None else _folder_chat_template(folder, config)
    tokenizer = LibraryTokenizer(backend, make_facts(backend, bos_id, eos, template, names))
    try:
        tokenizer.encode("a")  # some faults only show here
    except RequestError as error:
        raise ConfigError(f"{path}: cannot be read as a tokenizer: {error}") from None
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, or {} if there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def _text_of(entry: object) -> str | None:
    """Return the text of a special token, which is a string or an object with a string in `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _special_token_texts(*configs: dict[str, Any]) -> dict[str, str]:
    """Map bos_token, eos_token, pad_token, ... to their text; earlier files take precedence."""
    texts: dict[str, str] = {}
    for config in reversed(configs):
        for name, entry in config.items():
            text = _text_of(entry)
            if name.endswith("_token") and text is not None:
                texts[name] = text
    return texts


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks or does not mark as special."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ConfigError(f"added_tokens_decoder = {abbreviate(entries)}, expected an object")
    known = backend.get_added_tokens_decoder()
    for token_id, token in sorted((_added_token(*item) for item in entries.items()), key=lambda pair: pair[0]):
        if token_id in known and known[token_id].special == token.special:
            continue
        added = backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if added and backend.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"added_tokens_decoder gives {abbreviate(token.content)} the id {token_id}, "
                f"but with tokenizer.json it gets {backend.token_to_id(token.content)}"
            )


def _added_token(key: str, entry: object) -> tuple[int, tokenizers.AddedToken]:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise ConfigError(f"added_tokens_decoder has the key {abbreviate(key)}, expected a token id")
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise ConfigError(
            f"added_tokens_decoder[{key}] = {abbreviate(entry)}, expected an object with a string content"
        )
    try:
        return int(key), tokenizers.AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
    except TypeError as error:
        raise ConfigError(f"added_tokens_decoder[{key}] = {abbreviate(entry)}: {shorten(str(error))}") from None


def _apply_bos_and_eos_flags(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Apply add_bos_token and add_eos_token of tokenizer_config.json. They only count for Llama-like tokenizers."""
    if config.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"):
        return
    bos, eos = _text_of(config.get("bos_token")), _text_of(config.get("eos_token"))
    backend.post_processor = bos_eos_template(
        backend,
        bos if config.get("add_bos_token", True) else None,
        eos if config.get("add_eos_token", False) else None,
    )


def _ids_of(folder: Path, backend: tokenizers.Tokenizer, eos_text: str | None) -> tuple[int, ...]:
    """Return the end-token ids: the tokenizer's own, then those of generation_config.json, or else of config.json."""
    ids: list[int] = []
    if eos_text is not None and (token_id := backend.token_to_id(eos_text)) is not None:
        ids.append(token_id)
    for file in ("generation_config.json", "config.json"):
        stated = ConfigReader(_read_json(folder / file), str(folder / file)).ids("eos_token_id")
        if stated:
            ids.extend(stated)
            break
    return tuple(dict.fromkeys(ids))


def _folder_chat_template(folder: Path, config: dict[str, Any]) -> "str | dict[str, str] | None":
    """Return the template or the templates by name.

    "default" is chat_template.jinja, else what tokenizer_config.json or chat_template.json states, which may be
    several; others are additional_chat_templates/NAME.jinja.
    """
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths["default"] = folder / "chat_template.jinja"
    files = {name: _read_template_file(path) for name, path in paths.items()}
    if "default" in files:
        return files
    stated = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in stated):
            raise ConfigError(
                f"{folder}: chat_template = {abbreviate(stated)}, expected objects with name and template"
            )
        return {str(entry["name"]): entry["template"] for entry in stated} | files
    return {"default": stated, **files} if files and stated else files or stated
