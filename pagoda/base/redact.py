"""Take secrets out of settings and texts that are given to other people."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, cast

from pagoda.base.config import PARTS, EngineConfig
from pagoda.base.setting import describe_settings

HIDDEN = "(secret)"
_SHORTEST = 4  # characters; a shorter value would be hidden all over a text
_NAMES = r"[\w.-]*(?:api[_-]?keys?|access[_-]?key|token|secret|passw(?:or)?d|passphrase|credentials?|private[_-]?key)"
_NAMED = re.compile(_NAMES, re.IGNORECASE)
_HEADERS = r"(?:proxy-)?authorization|x-api-key|api-key|(?:set-)?cookie|[\w-]*otlp[\w-]*headers"
_PLAIN = r"(?!(?:[\d.]+|null|none|true|false)(?:[\s'\",;&}\]]|\Z))[^\s'\",;&}\]]{4,}"  # neither number nor word
_FORMS = [
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(rf"(?i)\b({_HEADERS})(['\"]?\s*[:=]\s*['\"]?)[^\r\n'\"]+"), rf"\1\2{HIDDEN}"),
    (re.compile(r"\b(Bearer|Basic|(?i:bearer|basic)(?=\s+\S*\d))\s+[\w.~+/=-]{4,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<=://)[^/\s@'\"]+@"), f"{HIDDEN}@"),
    (re.compile(r"\b(?:hf_[A-Za-z0-9]{8}|sk-|gh[pousr]_|glpat-|xox[abp]-|AKIA)[\w-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), HIDDEN),
    (re.compile(rf"(?i)({_NAMES}['\"]?\s*[:=]\s*)\[[^\]]*\]"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)({_NAMES}['\"]?\s*[:=]\s*['\"]?){_PLAIN}"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(--{_NAMES}\s+['\"]?){_PLAIN}"), rf"\1{HIDDEN}"),
]
"""Forms of secrets in any text, and what to put in their place."""


class Redactor:
    """Hides given secrets, and whatever looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {one.strip() for one in secrets}
        self._known = sorted((one for one in known if len(one) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self._known:
            text = text.replace(secret, HIDDEN)
        for form, hidden in _FORMS:
            text = form.sub(hidden, text)
        return text

    def value(self, value: Any) -> Any:
        """Return a value of strings, lists and mappings without secrets."""
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(one) for one in cast("Iterable[Any]", value)]
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return {self.text(str(key)): self._named(str(key), one) for key, one in pairs}
        return value

    def _named(self, name: str, value: Any) -> Any:
        return HIDDEN if value and isinstance(value, str | list) and is_secret(name) else self.value(value)


def is_secret(name: str) -> bool:
    """Return whether a value of this name is taken for a secret."""
    return _NAMED.fullmatch(name) is not None


def secrets_of(config: EngineConfig) -> list[str]:
    """Return the values of settings that are secrets."""
    found: list[str] = []
    for part, kind in PARTS.items():
        for item in describe_settings(kind):
            if item.setting.is_secret and (value := getattr(getattr(config, part), item.name)) is not None:
                found += [str(one) for one in value] if isinstance(value, tuple) else [str(value)]
    return found


def settings_without_secrets(config: EngineConfig) -> dict[str, Any]:
    """Return all settings, by part, as JSON has them."""
    settings: dict[str, Any] = dataclasses.asdict(config)
    for part, kind in PARTS.items():
        for item in describe_settings(kind):
            if item.setting.is_secret and settings[part][item.name]:
                settings[part][item.name] = HIDDEN
    cleaned: dict[str, Any] = Redactor(secrets_of(config)).value(settings)
    return cleaned
