"""Owns reading a file of a model folder that holds one JSON object.
It knows nothing of what the files say.
"""

import json
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file.

    Raises ConfigError naming the file when it cannot be read or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, not an object")
    return value
