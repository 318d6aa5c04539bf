"""JSON files that come with a model: size, nesting and encoding are checked, and every failure names the file."""

import json
from pathlib import Path

from pagoda.base.errors import ConfigError

MAX_JSON_BYTES = 64 << 20


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Return the object in `path`.

    Raises ConfigError if the file cannot be read, is too large, is not JSON, is nested too deeply, or holds no object.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise ConfigError(f"{path}: file too large ({num_bytes} bytes; at most {max_bytes})")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: corrupt JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path}: corrupt JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values
