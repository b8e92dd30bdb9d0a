"""Keeps secrets out of what is written: values of ``${oc.env:NAME}``, and credentials in addresses and ``extra_body``.

A saved configuration has the interpolation. Credentials that were typed become ``***``, which is refused when it is
read. What tells runs apart counts a value of the environment by its digest, and a credential not at all.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from attnpo.system.files import Json

MASK = "***"
BODY = "extra_body"  # goes with every request; its names alone say what of it is a credential
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
_interpolations: dict[str, dict[str | None, str]] = {}  # of a text: as it was written, by key and for any key


# ------------------------------------------------------------------------------------------------ the environment


def record_env_read(variable: str) -> None:
    """Notes that a configuration has read a variable of the environment."""
    _reads.append(variable)


@contextmanager
def collect_env_reads() -> Iterator[list[str]]:
    """Opens a context whose list has the names of the variables that were read in it."""
    _reads.clear()
    yield _reads


def record_interpolation(key: str, text: str, written: str) -> None:
    """Notes that ``key`` has its ``text`` from the environment, by the interpolation ``written``."""
    for same in (text, text.rstrip("/")):
        _interpolations.setdefault(same, {}).update({key: written, None: written})


# ------------------------------------------------------------------------------------------------ masks


def mask_credentials(text: str) -> str:
    """Returns a text with its credentials masked: logins and parameters of addresses, and those in ``extra_body``."""
    if "://" in text:
        text = _LOGIN.sub(lambda found: _hide(found[0], _VARIABLE.sub("", found[0]).rpartition(":")[2]), text)
        text = _QUERY.sub(lambda found: found[1] + _hide(found[2], found[2]), text)
    if BODY in text:
        text = _IN_BODY.sub(lambda found: found[1] + _hide(found[2], found[2]), text)
        text = _TOKEN.sub(MASK, text)
    return text


def _hide(text: str, secret: str) -> str:
    """Returns ``text`` where its ``secret`` is but an interpolation, else the mask."""
    return MASK if _VARIABLE.sub("", secret) else text


def is_masked(text: str, key: str) -> bool:
    """Tells whether the value of ``key`` lacks credentials that were masked."""
    return _MASKED.search(text) is not None or (text == MASK and BODY in key)


# ------------------------------------------------------------------------------------------------ what is written


def to_savable(values: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a configuration's values as they may be saved; other texts with ``${`` in them are escaped."""

    def save(text: str, key: str, secret: bool) -> str:
        written = _interpolations.get(text, {}).get(key)
        return (
            mask_credentials(written)
            if written is not None
            else MASK
            if secret
            else re.sub(r"(?<!\\)\$\{", r"\\${", mask_credentials(text))
        )

    return cast(dict[str, Json], _map_texts(dict(values), save))


def digest_env_values(values: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the digest of each text that its key has from the environment, credentials left out, by key."""
    found: dict[str, Json] = {}

    def note(text: str, key: str, secret: bool) -> str:
        if not secret and key in _interpolations.get(text, {}):
            found[key] = _digest(text)
        return text

    _map_texts(dict(values), note)
    return found


def redact(values: object) -> object:
    """Returns values for readers: what came from the environment as its interpolation, credentials masked."""
    return _map_texts(
        cast(Json, values),
        lambda text, key, secret: mask_credentials(_interpolation_of(text) or (MASK if secret else text)),
    )


def identify(values: Mapping[str, object]) -> dict[str, object]:
    """Returns values that tell things apart: like ``redact``, with a digest of what came from the environment."""

    def identify(text: str, key: str, secret: bool) -> str:
        written = _interpolation_of(text)
        return (
            MASK
            if secret
            else mask_credentials(text)
            if written is None
            else f"{mask_credentials(written)} ({_digest(text)})"
        )

    return cast(dict[str, object], _map_texts(cast(Json, dict(values)), identify))


def is_same_identity(stored: object, value: object) -> bool:
    """Tells if ``stored`` is ``value``, or what ``identify`` makes of it, in this process or was made in another."""
    if isinstance(stored, list) and isinstance(value, list | tuple):
        return len(stored) == len(value) and all(map(is_same_identity, stored, value))
    if isinstance(stored, str) and isinstance(value, str):
        return stored in (value, mask_credentials(value)) or stored.endswith(f" ({_digest(value)})")
    return stored == value


def _digest(text: str) -> str:
    return hashlib.sha256(mask_credentials(text).encode()).hexdigest()[:12]


def _interpolation_of(text: str) -> str | None:
    return _interpolations.get(text, {}).get(None)


def _map_texts(value: Json, change: Callable[[str, str, bool], str], key: str = "") -> Json:
    """Returns ``value`` with its texts changed, given their keys and whether they are credentials in ``extra_body``."""
    if isinstance(value, Mapping):
        return {name: _map_texts(item, change, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change, f"{key}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return change(value, key, BODY in key and bool(_NAMED.search(key) or _TOKEN.search(value)))
