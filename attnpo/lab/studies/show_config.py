"""All keys of ``configs/show.yaml`` as a typed root: those of ``fit``, and which pairs are shown and how."""

from dataclasses import dataclass

from attnpo.lab.studies.fit_config import FitConfig
from attnpo.run.show_config import ShowConfig
from attnpo.schema import UserError


@dataclass(frozen=True)
class ShowRoot(ShowConfig, FitConfig):
    """Configuration of ``attnpo.show``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.study is not None:
            raise UserError(f"experiment={self.study.name} is a study, and pairs are shown of one run: leave it out")
