"""The last words of a run: what came out, and what to do next as commands that can be pasted."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from attnpo.cli.terminal import command_text, override
from attnpo.config.compose import Composition, load
from attnpo.run.result import RunResult
from attnpo.run.run_config import RunConfig
from attnpo.schema import UserError

PLACES = ("name", "resume")


def ending(composed: Composition, seed: int, folder: Path, result: RunResult) -> Iterator[str]:
    """Yields the outcome of a finished run, then up to three commands, each on a line of its own."""
    yield f"came out: {outcome_text(result)}"
    yield f"page and all numbers: {folder}"
    yield "next, each as it can be pasted:"
    for text in next_commands(composed, seed, folder):
        yield f"  {text}"


def outcome_text(result: RunResult) -> str:
    """Returns the outcome in words; one run tells nothing of other weights, which is said."""
    if result.truth is not None:
        scores = result.truth["test"].numbers
        text = (
            f"on held-out prompts the true reward is {scores['reward']:.3f}, the base's {scores['base_reward']:.3f}; "
            f"the answer is the better one in {100 * scores['win_rate']:.0f} %, at a KL of {scores['kl']:.2f}"
        )
    else:
        loss, first = (result.metrics.get(name, math.nan) for name in ("val/loss", "first/val/loss"))
        share = result.metrics.get("val/rewards/accuracies", math.nan)
        text = (
            f"validation loss {loss:.4f} ({first:.4f} before training), chosen above rejected in {100 * share:.0f} % "
            "of the validation pairs"
        )
        text += f" ({result.overlap_warning})" if result.overlap_warning else ""
    if result.training_warning is not None:
        return f"{text}. WARNING: {result.training_warning}"
    return f"{text}. One run, nothing to compare it with"


def next_commands(composed: Composition, seed: int, folder: Path) -> list[str]:
    """Returns commands for the run as a table, another seed of it, and its like with other weights to compare it with.

    An objective that cannot have those weights gives way to DPO or TwDPO. Leaves out what ``fit`` would refuse, as the
    weights of a reward model, which can only be uniform.
    """
    uniform = composed.choices.get("weights") == "uniform"
    other, objective = ("attention", "twdpo") if uniform else ("uniform", "dpo")
    twins = [(f"weights={other}",), (f"weights={other}", f"objective={objective}")]
    other_seed = replace(composed, overrides=_replace_overrides(composed, f"seed={seed + 1}")).arguments()
    found = [other_seed, next(filter(None, (_fresh(composed, *twin) for twin in twins)), None)]
    return [command_text("report", str(folder)), *(command_text("fit", *words) for words in found if words)]


def _fresh(composed: Composition, *given: str) -> list[str] | None:
    """Returns what ``fit`` is given for this run with other choices, in a folder of its own; None where it refuses."""
    try:
        again: RunConfig = load("fit", _replace_overrides(composed, *given), composed.config_dir)
    except UserError:
        return None
    return again.composed.arguments()


def _replace_overrides(composed: Composition, *given: str) -> tuple[str, ...]:
    """Returns the run's overrides with others in place of their like, and without those of its folder."""
    replaced = {*PLACES, *map(_key, given)}
    return (*(item for item in composed.overrides if _key(item).partition(".")[0] not in replaced), *given)


def again(composed: Composition, name: str) -> list[str]:
    """Returns what ``fit`` is given to go on with the run in the folder ``name`` below ``output``."""
    kept = [item for item in composed.overrides if _key(item) not in PLACES]
    return replace(composed, overrides=(*kept, override("name", name), "resume=auto")).arguments()


def _key(item: str) -> str:
    return item.lstrip("+~").partition("=")[0]
