"""JSON files that come with a model: size, nesting and encoding are checked, and every failure names the file."""

import json
from pathlib import Path

from pagoda.base.errors import ConfigError

MAX_JSON_BYTES = 64 << 20


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Return the object in `path`.

    Raises ConfigError if the file cannot be read, is too large, is not JSON, is nested too deeply, or holds no object.
    """
    values = _read_json(path, max_bytes)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_json_objects(path: Path, max_bytes: int = MAX_JSON_BYTES) -> list[dict[str, object]]:
    """Return the list of objects in `path`. Raises ConfigError as `read_json_object`."""
    values = _read_json(path, max_bytes)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ConfigError(f"{path}: expected a JSON list of objects")
    return values


def _read_json(path: Path, max_bytes: int) -> object:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise ConfigError(f"{path}: file too large ({num_bytes} bytes; at most {max_bytes})")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: corrupt JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path}: corrupt JSON: {error}") from None
