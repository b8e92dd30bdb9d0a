"""Exception of a run that a signal ended."""

import signal
from pathlib import Path


class Interrupted(KeyboardInterrupt):
    """Run ended by a signal: which, after which optimiser step, and what was saved.

    ``exit_status`` is what shells expect: 130 for SIGINT, 143 for SIGTERM, 138 for SIGUSR1. ``advice`` says how to go
    on; without one it is the run's own name.
    """

    advice: str | None = None

    def __init__(self, signum: int, step: int = 0, total: int = 0, saved: Path | None = None) -> None:
        super().__init__(signum, step, total, saved)
        self.signum, self.step, self.total, self.saved = signum, step, total, saved

    @property
    def exit_status(self) -> int:
        """Returns the exit status of a process that this signal ended."""
        return 128 + self.signum

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signum).name} at step {self.step} of {self.total}, "
        if self.saved is None:
            return stopped + "nothing saved" + (f"; {self.advice}" if self.advice else "")
        advice = self.advice or f"go on with name={self.saved.parent.name} resume=auto"
        return f"{stopped}saved {self.saved}; {advice}"
