"""Evaluates the theorem at the paper's own weight statistics: is it informative about the runs it is meant for?

The table has means over a training set, but the product of two means is not the mean of the products, and the theorem
needs the largest value over all responses. Delta here is that of a response with the mean length and the mean largest
weight.
"""

from dataclasses import dataclass

from experiments.theory.paper_bounds import TRIVIAL, lemma_bound, theorem_bound

CONSTANTS = (1e-2, 1e-1, 1.0)  # log-ratios per token, C of A2: from a policy that has hardly moved to one that has


@dataclass(frozen=True)
class Published:
    """Row of the paper's table of weight statistics (``experiments/paper/weight_statistics/printed.csv``).

    Means over responses: ``std`` and ``largest`` of the weights within a response, ``length`` in tokens.
    """

    model: str
    side: str
    std: float
    largest: float
    length: float

    @property
    def delta(self) -> float:
        """Returns ``|y| max a - 1``."""
        return self.length * self.largest - 1

    @property
    def effective(self) -> float:
        """Returns the effective number of weighted tokens, 1 over the sum of squares: ``1 / (n (std^2 + 1 / n^2))``."""
        return 1 / (self.length * (self.std**2 + self.length**-2))

    def kl_bound(self, constant: float) -> float:
        """Returns the bound of both lemmas in nats, for policies with answers as long as the training set's."""
        return lemma_bound(self.delta, constant, 2 * self.length)

    def tv_bound(self, constant: float) -> float:
        """Returns the theorem's bound."""
        return theorem_bound(self.delta, constant, 2 * self.length, 2 * self.length)

    @property
    def largest_constant(self) -> float:
        """Returns the C at which the theorem's bound reaches 1 and becomes trivial."""
        return (TRIVIAL / self.tv_bound(1.0)) ** 2


TABLE = (
    Published("Llama-3-8B-Base-SFT", "chosen", 0.0177, 0.1242, 269.0895),
    Published("Llama-3-8B-Base-SFT", "rejected", 0.0175, 0.1202, 235.3978),
    Published("Llama-3-8B-Instruct", "chosen", 0.0126, 0.0915, 356.9848),
    Published("Llama-3-8B-Instruct", "rejected", 0.0137, 0.0959, 365.8176),
)
