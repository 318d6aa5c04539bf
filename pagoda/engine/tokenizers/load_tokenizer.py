"""Load a model's tokenizer from its folder, its GGUF file or an override."""

from pathlib import Path

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import ConfigError
from pagoda.engine.tokenizers.folder_tokenizer import load_folder_tokenizer
from pagoda.engine.tokenizers.gguf_tokenizer import load_gguf_tokenizer
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer
from pagoda.loading.model_files import ModelFiles, exists, identify


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
    return load_folder_tokenizer(folder, template_text)


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
