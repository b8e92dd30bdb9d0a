"""How a study's arms name the models that it trains for them: ``weights.oracle.path=SCORER.NAME`` in their overrides.

Owns the placeholder and what can be wrong with one. Light: read with the configuration.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from attnpo.config.reader import did_you_mean

PREFIX = "SCORER."
# Where a model that weighs may stand: all paths of a run but those of what is trained.
PLACES = ("judge.path", "verbalizer.path", "weights.path", "weights.NAME.path")


def scorers_of(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the scorers that an arm's overrides name, by the key that takes the model's path."""
    parts = (item.partition("=") for item in overrides)
    return {
        key.lstrip("+~"): value.removeprefix(PREFIX)
        for key, _, value in parts
        if value.startswith(PREFIX) and value != PREFIX
    }


def scorer_problems(scorers: Mapping[str, Sequence[str]], arms: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what is wrong with a study's scorers, and with the names that its arms have for them."""
    for name, overrides in scorers.items():
        if not name.isidentifier():
            yield f"study.scorers has {name!r}: expected a name of letters, digits and _, as in {PREFIX}oracle"
        for key, other in scorers_of(overrides).items():
            yield (
                f"study.scorers.{name} has {key}={PREFIX}{other}: scorers are trained side by side, and none can wait "
                "for another: give a path, or leave it out"
            )
        if any(item.lstrip("+~").startswith(("data.path=", "data.mix")) for item in overrides):
            yield (
                f"study.scorers.{name} sets data.path or data.mix: scorers are trained on the study's own pairs; leave "
                "it out"
            )
    for arm, overrides in arms.items():
        for key, name in scorers_of(overrides).items():
            if name not in scorers:
                yield (
                    f"arm {arm} has {key}={PREFIX}{name}, and study.scorers has "
                    f"{', '.join(scorers) or 'none'}{did_you_mean(name, list(scorers))}"
                )
            if key not in PLACES and re.fullmatch(r"weights\.[^.]*\.path", key) is None:
                yield (
                    f"arm {arm} has {key}={PREFIX}{name}: a scorer stands for a model that weighs; expected one of "
                    f"{', '.join(PLACES)}"
                )
