"""The last words of a run: what came out, and what to do next as commands that can be pasted."""

import math
from collections.abc import Iterator
from pathlib import Path

from attnpo.console import command_text, override
from attnpo.runs.result import RunResult
from attnpo.runs.run_config import RunConfig

PLACES = ("name", "resume")


def ending(cfg: RunConfig, folder: Path, result: RunResult) -> Iterator[str]:
    """What came out of a finished run, then three commands, each on a line of its own."""
    yield f"came out: {outcome_text(result)}"
    yield f"page and all numbers: {folder}"
    yield "next, each as it can be pasted:"
    for text in next_commands(cfg, folder):
        yield f"  {text}"


def outcome_text(result: RunResult) -> str:
    """The outcome in words; one run tells nothing of other weights, which is said."""
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
    return f"{text}. One run, nothing to compare it with"


def next_commands(cfg: RunConfig, folder: Path) -> list[str]:
    """The run as a table, another seed of it, and the same run with other weights to compare it with.

    Leaves out the last for a reward model, whose weights can only be uniform.
    """
    uniform = cfg.composed.choices.get("weights") == "uniform"
    other = "weights=attention" if uniform else "weights=uniform"
    return [
        command_text("report", str(folder)),
        command_text("fit", *_fresh(cfg, "seed", f"seed={cfg.seed + 1}")),
        *([] if cfg.model.reward else [command_text("fit", *_fresh(cfg, "weights", other))]),
    ]


def _fresh(cfg: RunConfig, replaced: str, given: str) -> list[str]:
    """The run's overrides with one replaced, and without those that name its folder, for a run of its own."""
    kept = [item for item in cfg.composed.overrides if _key(item) not in PLACES and _key(item) != replaced]
    kept = [item for item in kept if not _key(item).startswith(f"{replaced}.")]
    folder = cfg.composed.config_dir
    return [*kept, given, *([] if folder is None else ["--config-dir", str(folder)])]


def again(cfg: RunConfig, folder: Path) -> list[str]:
    """What ``fit`` is given to go on with the run in ``folder``."""
    name = folder.relative_to(cfg.output).as_posix()
    kept = [item for item in cfg.composed.overrides if _key(item) not in PLACES]
    given = cfg.composed.config_dir
    rest = [] if given is None else ["--config-dir", str(given)]
    return [*kept, override("name", name), "resume=auto", *rest]


def _key(item: str) -> str:
    return item.lstrip("+~").partition("=")[0]
