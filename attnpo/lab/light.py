"""Constants and settings of the lab's measurements. Has no heavy imports, so configs can load it early."""

from dataclasses import dataclass

from attnpo.schema import UserError, check_at_least

# Token classes by weight and by true reward, as reported in a run's drift.
END, NO_WEIGHT, BELOW, WEIGHTED, OTHER = "end_of_turn", "no_weight", "below_uniform", "weighted", "other"
DECISIVE = "decisive"


@dataclass(frozen=True)
class LayerRules:
    """Rules for finding a layer with ``weights.layer=auto``.

    ``pairs``: size of the calibration sample, which consists of the first training pairs sorted by id. For each of
    ``shares``, the top-weighted tokens are removed; the effect is compared with that of removing as many random tokens
    at similar positions, averaged over ``draws`` draws seeded by ``seed``. An even number of draws cancels the judge's
    position bias. The search needs pairs x layers x shares x (2 + draws) judge prompts.
    """

    pairs: int = 64
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("auto_layer", 1, pairs=self.pairs, draws=self.draws)
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"auto_layer.shares: expected shares between 0 and 1, got {list(self.shares)}")
