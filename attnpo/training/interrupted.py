"""Exception raised when a signal stops a run."""

import signal
from pathlib import Path


class RunInterrupted(KeyboardInterrupt):
    """Raised when a signal stops a run; records the signal, the last optimiser step and the saved folder.

    ``exit_status`` follows the shell convention: 130 for SIGINT, 143 for SIGTERM, 138 for SIGUSR1. ``advice``: how to
    continue the run; the default names the run.
    """

    advice: str | None = None

    def __init__(self, signum: int, step: int = 0, total: int = 0, saved: Path | None = None) -> None:
        super().__init__(signum, step, total, saved)
        self.signum, self.step, self.total, self.saved = signum, step, total, saved

    @property
    def exit_status(self) -> int:
        """Returns the exit status of a process stopped by this signal."""
        return 128 + self.signum

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signum).name} at step {self.step} of {self.total}, "
        if self.saved is None:
            return stopped + "nothing saved" + (f"; {self.advice}" if self.advice else "")
        advice = self.advice or f"continue with name={self.saved.parent.name} resume=auto"
        return f"{stopped}saved {self.saved}; {advice}"
