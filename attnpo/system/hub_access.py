"""Checks once whether the Hugging Face hub is reachable, which saves half a minute of retries.

Without this check, the hub's libraries would try five times, with growing pauses, before falling back to their cache.
They would repeat this for each file.
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
"""Timeout of the check in seconds."""


@cache
def hub_unreachable_reason() -> str | None:
    """Returns why the hub cannot be reached, or None if it can; checked once per process."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE):
            return None
    except HTTPError:
        return None  # the hub answered
    except OSError as error:
        reason = getattr(error, "reason", error)
        # The libraries may be configured to trust a certificate that urllib rejects.
        return None if isinstance(reason, SSLError) else f"{constants.ENDPOINT} cannot be reached ({reason})"


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Makes the hub's libraries use their local cache inside the context if the hub is unreachable."""
    from huggingface_hub import constants

    # The libraries read these switches on each request, but the environment variable only on import.
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
