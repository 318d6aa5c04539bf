"""`pagoda transcribe`: the text of sound files, on standard output or as files next to each other."""

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.errors import ConfigError, RequestError
from pagoda.cli.options import engine_config, engine_flags

if TYPE_CHECKING:
    from pagoda.base.outputs import TranscriptionOutput

DEFAULT_MODEL = "whisper-tiny.en"


class Format(Enum):
    TXT = "txt"
    SRT = "srt"
    VTT = "vtt"
    JSON = "json"


@engine_flags()
def transcribe(
    files: Annotated[
        list[str], typer.Argument(help="Sound files: wav, mp3, flac, ogg, m4a, mp4, webm.", metavar="FILE...")
    ],
    *,
    options: dict[str, object],
    form: Annotated[Format, typer.Option("--format", "-f", help="Form of the output.")] = Format.TXT,
    output_dir: Annotated[
        str | None, typer.Option("--output-dir", "-o", help="Write a file per sound here, named after it.")
    ] = None,
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="Code or English name (default: detected).")
    ] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Translate into English.")] = False,
    prompt_text: Annotated[
        str | None, typer.Option("--initial-prompt", help="Text in front of the first window, for names and style.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", help="Tried in turn until a text is good enough. May be repeated."),
    ] = None,
    condition: Annotated[
        bool, typer.Option("--condition-on-previous-text", help="Put the text so far in front of each window.")
    ] = False,
    cut: Annotated[
        bool, typer.Option("--cut-at-silences", help="Cut long sounds where they are quiet; the pieces run at once.")
    ] = False,
    words: Annotated[
        bool, typer.Option("--word-timestamps", help="Find when each word is said, too (with --format json).")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Write down what is said in sound files.

    Progress goes to standard error. Without --model, the model is whisper-tiny.en, which knows English alone.
    """
    if len(files) > 1 and output_dir is None and form in (Format.SRT, Format.VTT):
        raise ConfigError(f"--format {form.value} of several files needs --output-dir: subtitles are a file each")
    if words and form is not Format.JSON:
        raise ConfigError(f"--word-timestamps needs --format json: {form.value} has no place for words")
    for name in files:
        if not Path(name).is_file():  # before a model is loaded
            raise RequestError(f"file {name!r:.200} does not exist, or is not a file", "file")
    if output_dir is not None:
        _check_targets(files)
    from pagoda.cli.console import ask_before_fetching
    from pagoda.cli.session import load
    from pagoda.engine.transcription.formats import FORMATS
    from pagoda.engine.transcription.transcriber import TranscriptionFields

    chosen: TranscriptionFields = {
        "language": language,
        "task": "translate" if translate else "transcribe",
        "prompt": prompt_text,
        "condition_on_previous_text": condition,
        "cut_at_silences": cut,
        "word_timestamps": words,
    }
    if temperature:
        chosen["temperature"] = tuple(temperature)
    options = {"model": DEFAULT_MODEL, **options}
    ask_before_fetching(engine_config(options).model)
    with load(options) as llm:
        outputs = llm.transcribe(files, use_tqdm=not quiet, **chosen)
    for name, output in zip(files, outputs, strict=True):
        if output.error is None:
            _write(FORMATS[form.value](output), name, output, output_dir, form)
    if any(output.error is not None for output in outputs):  # the log has named them
        raise typer.Exit(1)


def _check_targets(files: list[str]) -> None:
    """Raise ConfigError for two files whose outputs would have the same name."""
    by_stem: dict[str, str] = {}
    for name in files:
        other = by_stem.setdefault(Path(name).stem, name)
        if other is not name:
            raise ConfigError(
                f"{other!r:.200} and {name!r:.200} would be written to the same file of --output-dir: transcribe them "
                "in two runs, or rename one"
            )


def _write(text: str, name: str, output: "TranscriptionOutput", output_dir: str | None, form: Format) -> None:
    if output_dir is None:
        sys.stdout.write(text)
        return
    target = Path(output_dir) / f"{Path(name).stem}.{form.value}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}; choose another --output-dir") from None
