"""What was predicted of a study before its points ran."""

from dataclasses import dataclass

from attnpo.schema import UserError


@dataclass(frozen=True)
class Claim:
    """One prediction: at KL ``level`` the test rewards of ``above`` sum to more than those of ``below``.

    Both list as many (world, arm); one of each is a difference of two arms, two of each a difference of differences.
    ``about`` names the explanation it follows from, ``says`` is the prediction in words.
    """

    about: str
    says: str
    above: tuple[tuple[str, str], ...]
    below: tuple[tuple[str, str], ...]
    level: float = 1.0

    def __post_init__(self) -> None:
        if not self.above or len(self.above) != len(self.below):
            raise UserError(
                "study.predictions: expected as many (world, arm) in above as in below, got "
                f"{len(self.above)} and {len(self.below)}"
            )
        if not self.level > 0:
            raise UserError(f"study.predictions: expected a KL level above 0, got {self.level}")


@dataclass(frozen=True)
class Predictions:
    """What was expected of a study on ``seeds`` before it ran on any of them, and the ``rule`` that decides.

    ``settings``: digest of the grid, arms and worlds they were made for (``settings_digest``); None takes any.
    """

    seeds: tuple[int, ...]
    rule: str
    claims: dict[str, Claim]
    settings: str | None = None

    def record(self) -> dict[str, object]:
        """Returns the predictions as they are kept beside a study's results, and digested."""
        claims = {
            name: {**vars(claim), "above": [*map(list, claim.above)], "below": [*map(list, claim.below)]}
            for name, claim in self.claims.items()
        }
        return {"seeds": list(self.seeds), "rule": self.rule, "claims": claims}
