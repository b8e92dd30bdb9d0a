"""Configuration of the judge's passport. Has no heavy imports."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from attnpo.lab.reports.report_config import PLACES
from attnpo.lab.studies.config import FitConfig
from attnpo.run.run_config import TRAINING
from attnpo.schema import UserError, check_at_least, check_seed, digest


@dataclass(frozen=True)
class PassportSettings:
    """Settings of the passport: the data to judge and the layers and statistics to measure (config node ``passport``).

    ``pairs``: number of pairs drawn by ``seed`` from both splits. ``removal_pairs``: number of these pairs that are
    judged again with tokens removed; 0 skips this. Removing the top-weighted ``shares`` of the tokens is compared with
    removing random tokens at similar positions, ``draws`` times; an even number of draws cancels the judge's position
    bias. ``layers``: layers to measure; empty means all layers with attention. ``bins``: number of confidence bins.
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
    """Config of the judge's passport: the keys of ``fit`` and ``passport``, explained in ``configs/passport.yaml``."""

    trains: ClassVar[bool] = False

    passport: PassportSettings = field(default_factory=PassportSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "judge" not in self.weights.requires:
            chosen = self.composed.choices.get("weights", type(self.weights).__name__)
            raise UserError(
                f"weights={chosen} uses no judge, so there is nothing to measure: omit weights=, or choose weights "
                "that use one, e.g. weights=attention"
            )

    def unused_keys(self) -> dict[str, str]:
        """Lists config keys that have no effect, with reasons."""
        reason = "the passport trains nothing"
        own = {"judge.verdict": "the passport always reads verdicts", "transforms": reason}
        return {**super().unused_keys(), **dict.fromkeys(TRAINING, reason), **own}

    def command_digest(self) -> str:
        """Returns a digest of all settings of the command, which identifies the report's folder."""
        return digest({key: value for key, value in self.values.items() if key not in PLACES})[:16]

    def report_folder(self) -> Path:
        """Returns the report's folder below ``output``, named ``name`` or after the setting and command digest."""
        setting = self.composed.choices.get("setting", "setting")
        return Path(self.output) / (self.name or f"passport-{setting}-{self.command_digest()[:8]}")
