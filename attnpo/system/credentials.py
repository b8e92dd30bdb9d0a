"""Keeps secrets out of files and logs: values of ``${oc.env:NAME}``, and credentials in URLs and ``extra_body``.

A saved config contains the interpolation instead of the value. Credentials entered as literals are saved as ``***``,
which is rejected on loading. A run's identity includes environment values as digests, and ignores credentials.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from attnpo.system.files import Json

MASK = "***"
BODY = "extra_body"  # sent with every request; credentials in it are recognised by their names only
_VARIABLE = re.compile(r"\$\{[^}]*\}")
_NAME = (
    r"(?<![^\W_])(?:api|access|client|secret)*"
    r"(?:key|token|secret|password|passwd|pwd|auth|authorization|credential|signature|sig|cookie)s?"
)
_NAMED = re.compile(rf"(?i){_NAME}(?![^.])")
_TOKEN = re.compile(r"(?i:bearer|basic)\s+\S+|(?:sk|pk|hf|gh[a-z]|xox[a-z]|AKIA|eyJ)[-_A-Za-z0-9]{12,}")
_LOGIN = re.compile(r"(?<=://)[^\s/?#'\"]+(?=@)")
_QUERY = re.compile(rf"(?i)([?&](?:[\w.-]*[_.-])?{_NAME}=)([^\s&#'\"]+)")
_IN_BODY = re.compile(rf"(?i)({_NAME}['\"]?\s*[:=]\s*['\"]?)([^\s,}}'\"]+)")
_MASKED = re.compile(r"://\*\*\*@|[?&][^=&\s]+=\*\*\*(?![^&#])")

_reads: list[str] = []
_interpolations: dict[str, dict[str | None, str]] = {}  # resolved text -> its interpolation, by key and for any key


# ------------------------------------------------------------------------------------------------ the environment


def record_env_read(variable: str) -> None:
    """Records that a config has read an environment variable."""
    _reads.append(variable)


@contextmanager
def collect_env_reads() -> Iterator[list[str]]:
    """Collects the names of the environment variables that are read inside the context."""
    _reads.clear()
    yield _reads


def record_interpolation(key: str, text: str, written: str) -> None:
    """Records that the value ``text`` of ``key`` came from the environment through the interpolation ``written``."""
    for same in (text, text.rstrip("/")):
        _interpolations.setdefault(same, {}).update({key: written, None: written})


# ------------------------------------------------------------------------------------------------ masks


def mask_credentials(text: str) -> str:
    """Masks credentials in ``text``: logins and query parameters in URLs, and credentials in ``extra_body``."""
    if "://" in text:
        text = _LOGIN.sub(lambda found: _hide(found[0], _VARIABLE.sub("", found[0]).rpartition(":")[2]), text)
        text = _QUERY.sub(lambda found: found[1] + _hide(found[2], found[2]), text)
    if BODY in text:
        text = _IN_BODY.sub(lambda found: found[1] + _hide(found[2], found[2]), text)
        text = _TOKEN.sub(MASK, text)
    return text


def _hide(text: str, secret: str) -> str:
    """Returns ``text`` unchanged if the secret in it is just an interpolation; otherwise returns the mask."""
    return MASK if _VARIABLE.sub("", secret) else text


def is_masked(text: str, key: str) -> bool:
    """Returns whether credentials in the value of ``key`` were masked."""
    return _MASKED.search(text) is not None or (text == MASK and BODY in key)


# ------------------------------------------------------------------------------------------------ what is written


def to_savable(values: Mapping[str, Json]) -> dict[str, Json]:
    """Converts a config's values to a form that can be saved; literal strings that contain ``${`` are escaped."""

    def save(text: str, key: str, secret: bool) -> str:
        written = _interpolations.get(text, {}).get(key)
        return (
            mask_credentials(written)
            if written is not None
            else MASK
            if secret
            else re.sub(r"(?<!\\)\$\{", r"\\${", mask_credentials(text))
        )

    return cast(dict[str, Json], _map_strings(dict(values), save))


def digest_env_values(values: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a digest for each key whose value was read from the environment; credentials are omitted."""
    found: dict[str, Json] = {}

    def note(text: str, key: str, secret: bool) -> str:
        if not secret and key in _interpolations.get(text, {}):
            found[key] = _digest(text)
        return text

    _map_strings(dict(values), note)
    return found


def redact(values: object) -> object:
    """Converts values for display: environment values become their interpolations, and credentials are masked."""
    return _map_strings(
        cast(Json, values),
        lambda text, key, secret: mask_credentials(_interpolation_of(text) or (MASK if secret else text)),
    )


def identify(values: Mapping[str, object]) -> dict[str, object]:
    """Converts values for a run's identity: like ``redact``, plus a digest of each environment value."""

    def identify(text: str, key: str, secret: bool) -> str:
        written = _interpolation_of(text)
        return (
            MASK
            if secret
            else mask_credentials(text)
            if written is None
            else f"{mask_credentials(written)} ({_digest(text)})"
        )

    return cast(dict[str, object], _map_strings(cast(Json, dict(values)), identify))


def is_same_identity(stored: object, value: object) -> bool:
    """Returns whether ``stored`` equals ``value`` or the identity that any process would compute for ``value``."""
    if isinstance(stored, list) and isinstance(value, list | tuple):
        return len(stored) == len(value) and all(map(is_same_identity, stored, value))
    if isinstance(stored, str) and isinstance(value, str):
        return stored in (value, mask_credentials(value)) or stored.endswith(f" ({_digest(value)})")
    return stored == value


def _digest(text: str) -> str:
    return hashlib.sha256(mask_credentials(text).encode()).hexdigest()[:12]


def _interpolation_of(text: str) -> str | None:
    return _interpolations.get(text, {}).get(None)


def _map_strings(value: Json, change: Callable[[str, str, bool], str], key: str = "") -> Json:
    """Replaces every string in ``value``, at any depth, with ``change(string, key, is_credential)``."""
    if isinstance(value, Mapping):
        return {name: _map_strings(item, change, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change, f"{key}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return change(value, key, BODY in key and bool(_NAMED.search(key) or _TOKEN.search(value)))
