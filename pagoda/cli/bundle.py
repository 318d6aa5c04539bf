"""`pagoda doctor --bundle`: one file for a bug report, without secrets."""

import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.redact import Redactor, is_secret, secrets_of, settings_without_secrets
from pagoda.cli.arguments import read_settings
from pagoda.cli.serve import with_key_file
from pagoda.engine.recording.files import MAX_BYTES

_VARIABLES = re.compile(r"(PAGODA|VLLM|HF|HUGGING_FACE|OTEL|RAY|CUDA|OMP|MKL|OPENBLAS|TRITON|MALLOC|LD_PRELOAD)")
"""Environment variables that say how an engine runs."""
_MAX_BYTES = MAX_BYTES
"""Of one file: that of a recording. Of a longer log, the end is kept."""


def write_bundle(path: Path, report: Mapping[str, Any], config: Path | None, files: list[Path]) -> list[str]:
    """Write a .tar.gz of the report, settings, environment and files, and return the names of what is in it.

    config: file of settings.   files: logs and recordings. Raises ConfigError for what cannot be read or written.
    """
    redactor, settings = _settings(config)
    variables = {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
    texts = {
        "doctor.json": json.dumps(redactor.value(report), indent=1),
        "settings.json": json.dumps(settings, indent=1),
        "environment.json": json.dumps(redactor.value(variables), indent=1),
    }
    for number, file in enumerate(files, 1):
        texts[f"files/{number}-{file.name}"] = redactor.text(_end_of(file))
    try:
        path.touch(0o600, exist_ok=False)
        with tarfile.open(path, "w:gz") as bundle:
            for name, text in texts.items():
                data = text.encode(errors="replace")
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                bundle.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise ConfigError(f"--bundle {path} cannot be written ({error}): name a new file") from error
    return list(texts)


def _settings(config: Path | None) -> tuple[Redactor, dict[str, Any]]:
    """Return what hides the secrets that settings and environment have, and the settings of the file."""
    given = [value for name, value in os.environ.items() if is_secret(name) or name.endswith("HEADERS")]
    secrets = [*given, *(word for value in given for word in value.split())]
    if config is None:
        return Redactor(secrets), {}
    try:
        read = with_key_file(EngineConfig.from_options(**read_settings(config)))
    except ConfigError as error:
        raise ConfigError(f"{error}; leave --settings out to bundle without settings") from None
    secrets += secrets_of(read)
    return Redactor(secrets), Redactor(secrets).value(settings_without_secrets(read))


def _end_of(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            skipped = max(0, file.stat().st_size - _MAX_BYTES)
            opened.seek(skipped)
            data = opened.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if skipped:
        print(f"pagoda: of {file}, only the last {_MAX_BYTES >> 20} MiB are in the bundle", file=sys.stderr)
    return data.decode(errors="replace")
