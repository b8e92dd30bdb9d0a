"""Plain data of what the lab measures beside runs. Light: read before anything heavy is loaded."""

from dataclasses import dataclass

from attnpo.schema import UserError, check_at_least

# Classes of tokens by weight, and by the truth, in what a run says of where its policy moved.
END, NO_WEIGHT, BELOW, WEIGHTED, OTHER = "end_of_turn", "no_weight", "below_uniform", "weighted", "other"
DECISIVE = "decisive"


@dataclass(frozen=True)
class LayerRules:
    """Rules by which ``weights.layer=auto`` finds its layer.

    ``pairs``: the calibration sample, training pairs in the order of their ids. The top-weighted ``shares`` of the
    tokens are removed and compared with ``draws`` random removals (keyed by ``seed``) of as many tokens from the same
    places, an even number so that the judge's liking for a place cancels. Takes pairs x layers x shares x (2 + draws)
    judge prompts.
    """

    pairs: int = 64
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("auto_layer", 1, pairs=self.pairs, draws=self.draws)
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"auto_layer.shares: expected shares between 0 and 1, got {list(self.shares)}")
