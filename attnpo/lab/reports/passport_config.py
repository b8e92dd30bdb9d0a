"""Configuration of the judge's passport. Light: known before anything heavy is loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from attnpo.lab.reports.report_config import PLACES
from attnpo.lab.studies.config import FitConfig
from attnpo.run.run_config import TRAINING
from attnpo.schema import UserError, check_at_least, check_seed, digest


@dataclass(frozen=True)
class PassportSettings:
    """Settings of the passport: how much of the data is judged, and what is measured (config node ``passport``).

    ``pairs`` are drawn by ``seed`` from both splits; of the first ``removal_pairs`` of them (0: none) the top-weighted
    ``shares`` of the tokens are removed and compared with ``draws`` random removals from the same places, an even
    number so that the judge's liking for a place cancels. ``layers`` empty looks at every layer with attention.
    ``bins``: of confidence.
    """

    pairs: int = 256
    removal_pairs: int = 64
    layers: tuple[int | str, ...] = ()
    shares: tuple[float, ...] = (0.1, 0.2, 0.4)
    draws: int = 2
    bins: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("passport", 1, pairs=self.pairs, draws=self.draws, bins=self.bins)
        check_at_least("passport", 0, removal_pairs=self.removal_pairs)
        check_seed("passport.seed", self.seed)
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"passport.shares: expected shares between 0 and 1, got {list(self.shares)}")


@dataclass(frozen=True)
class PassportConfig(FitConfig):
    """Judge's passport; its key of ``configs/passport.yaml``, where it is explained, and those of ``fit``."""

    trains: ClassVar[bool] = False

    passport: PassportSettings = field(default_factory=PassportSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "judge" not in self.weights.requires:
            chosen = self.composed.choices.get("weights", type(self.weights).__name__)
            raise UserError(
                f"weights={chosen} reads no judge, so there is none to look at: leave weights= out, or choose weights "
                "that read one (weights=attention)"
            )

    def unread(self) -> dict[str, str]:
        """Keys without effect as the others stand, with the reason."""
        reason = "the passport trains nothing"
        own = {"judge.verdict": "the passport reads verdicts whatever it says", "transforms": reason}
        return {**super().unread(), **dict.fromkeys(TRAINING, reason), **own}

    def mark(self) -> str:
        """Returns the digest of everything the command asks for: what tells its folder from those of others."""
        return digest({key: value for key, value in self.values.items() if key not in PLACES})[:16]

    def folder(self) -> Path:
        """Returns the folder below ``output``: ``name``, else the setting's and a digest of the command."""
        setting = self.composed.choices.get("setting", "setting")
        return Path(self.output) / (self.name or f"passport-{setting}-{self.mark()[:8]}")
