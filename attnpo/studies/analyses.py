"""What a study measures beside its points: once per world and seed, behind the judge pass and before the points run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from attnpo.analysis.page import Section
    from attnpo.data.prepare import EncodedSet
    from attnpo.studies.ground import Ground
    from attnpo.studies.runner import Outcome

MeasuredBy = dict[tuple[str, int], dict[str, Any]]


@runtime_checkable
class StudyAnalysis(Protocol):
    """A measurement that needs no trained policy (config node ``study.analyses.NAME``)."""

    def measure(self, ground: "Ground", encoded: "dict[str, EncodedSet]", folder: Path) -> dict[str, Any]:
        """Plain JSON data of one world and seed; ``folder`` is where figures or files of its own may go.

        ``ground.cfg`` is the study's config in that world without the choices of any arm. The result is kept, and used
        again by a repeated command whose settings, world and judge are the same.
        """
        ...

    def sections(self, outcome: "Outcome", measured: MeasuredBy) -> "list[Section]":
        """What is shown of it beside the study's tables; ``measured`` is by (world, seed), the only world being ""."""
        ...
