"""Readers of a run's weights, and the weights themselves, for the pairs of a context."""

from collections.abc import Callable, Mapping

from attnpo.cli.terminal import command_text
from attnpo.data import weighing
from attnpo.data.prepare import EncodedSet
from attnpo.data.weighing import Weighed
from attnpo.judge.base import WeightReader
from attnpo.run.combinations import require_reader
from attnpo.run.context import RunContext, run_judge, run_reward, run_scorers, run_verbalizer
from attnpo.schema import UserError
from attnpo.system.machine import device_of
from attnpo.weights.base import WeightSource

READERS: Mapping[str, Callable[[RunContext], WeightReader]] = {
    "judge": run_judge,
    "generator": run_verbalizer,
    "scorers": run_scorers,
    "reward": run_reward,
}


def make_reader(context: RunContext, source: WeightSource) -> WeightReader | None:
    """Returns what ``source`` is read with in this run; None when it captures nothing. UserError for what is absent."""
    wanted = sorted(source.requires)
    if not wanted:
        return None
    if len(wanted) > 1 or wanted[0] not in READERS:
        raise UserError(
            f"weights {type(source).__name__} need {' and '.join(wanted)}; a run has one of {', '.join(READERS)}: "
            "choose other weights"
        )
    return READERS[wanted[0]](context)


def describe_refill(context: RunContext) -> str:
    """Returns how the store of this run is filled before a job of several processes."""
    return f"in one process or several: {command_text('weigh', *context.cfg.composed.arguments())}"


def weigh(
    context: RunContext,
    encoded: Mapping[str, EncodedSet],
    *,
    shard: tuple[int, int] | None = None,
    every_row: bool = False,
) -> Weighed:
    """Returns the run's weights for the pairs of ``encoded``, by ``attnpo.data.weighing.weigh``.

    ``weights.layer=auto`` must be settled already (``cfg.auto_layer.settle``).
    """
    cfg = context.cfg
    require_reader(cfg.weights, cfg.objective)
    return weighing.weigh(
        cfg.weights,
        make_reader(context, cfg.weights),
        context.store,
        encoded,
        device_of(cfg.trainer.accelerator),
        shard=shard,
        every_row=every_row,
        refill=describe_refill(context),
    )
