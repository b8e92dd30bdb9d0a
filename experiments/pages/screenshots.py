"""Takes screenshots of HTML pages in a headless Chromium: light, dark, and phone-sized.

    python -m experiments.pages.screenshots FOLDER [PAGE.html ...]

Writes FOLDER/NAME-LOOK.png for example explorers, the figure of the README, and the given pages, which are named by
their folder. `make screenshots` runs it on the pages of all runs and studies in outputs.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnpo.display.explorer import write_explorer
from attnpo.system.files import safe_filename
from experiments.pages.judge_to_loss import DOCS, NAME
from tests.display.browser import Browser, browser
from tests.display.explored import hard, many

LOOKS = {"light": (False, 1200), "dark": (True, 1200), "phone": (False, 400)}  # dark, pixels


def take_screenshots(
    tab: Browser, pages: Mapping[str, Path], folder: Path, *, ready: str = "true", whole: bool = True
) -> list[Path]:
    """Takes screenshots of ``pages`` in every look; waits until the expression ``ready`` is true in the page."""
    taken = []
    for name, page in pages.items():
        for look, (dark, width) in LOOKS.items():
            tab.look(dark=dark, width=width)
            tab.open(page)
            tab.until(ready)
            taken.append(tab.screenshot(folder / f"{name}-{look}.png", whole=whole))
    return taken


@contextmanager
def example_explorers() -> Iterator[dict[str, Path]]:
    """Writes example explorer pages to a temporary folder: an ordinary one, and one per hard-to-render script."""
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        scripts = {
            f"explorer-{name}": [hard(4)[place]]
            for place, name in enumerate(("english", "arabic", "hebrew", "chinese", "markup"))
        }
        pages = {"explorer": many(40, 300, 4), **scripts}
        yield {name: write_explorer(folder / f"{name}.html", pairs) for name, pairs in pages.items()}


def main(given: Sequence[str]) -> None:
    """Takes all screenshots and prints their paths."""
    folder, *others = (Path(one).resolve() for one in given)
    drawn = {NAME: DOCS / f"{NAME}.svg", **{safe_filename(f"{page.parent.name}-{page.stem}"): page for page in others}}
    with browser() as tab, example_explorers() as pages:
        taken = take_screenshots(tab, pages, folder, ready="document.documentElement.dataset.ready", whole=False)
        taken += take_screenshots(tab, drawn, folder)
    for path in taken:
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
