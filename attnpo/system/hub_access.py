"""Hugging Face hub as a place that may be out of reach: one short question in place of half a minute of retries.

Its libraries ask five times with growing pauses before they look into their own cache, and do so again for every file.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

PATIENCE = 5.0
"""Seconds the hub has to answer once."""


@cache
def hub_unreachable_reason() -> str | None:
    """Returns why the hub cannot be asked, or None when it can; asked once per process."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE):
            return None
    except HTTPError:
        return None  # it answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        # A certificate that is refused here may be one that the libraries are set to trust.
        return None if isinstance(reason, SSLError) else f"{constants.ENDPOINT} cannot be reached ({reason})"


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Opens a context in which the libraries use what they have downloaded before if the hub is out of reach."""
    from huggingface_hub import constants

    # The switches these libraries read at each request; their environment variable is read at import only.
    places: list[Any] = [constants]
    if "datasets" in sys.modules:
        places.append(sys.modules["datasets"].config)
    before = [place.HF_HUB_OFFLINE for place in places]
    offline = hub_unreachable_reason() is not None
    for place, was in zip(places, before, strict=True):
        place.HF_HUB_OFFLINE = was or offline
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = was
