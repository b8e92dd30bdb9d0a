"""Pictures of the pages, light and dark, by `make screenshots`: FOLDER/NAME-light.png and NAME-dark.png.

``python -m tests.display.screenshots FOLDER [PAGE.html ...]`` takes them of other pages beside the explorer.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnpo.display.explorer import write_explorer
from tests.display.browser import Browser, browser
from tests.display.explored import hard, many


def take(
    tab: Browser, pages: Mapping[str, Path], folder: Path, *, ready: str = "true", whole: bool = True
) -> list[Path]:
    """Pictures of ``pages`` by name in light and dark, once the expression ``ready`` is true in a page."""
    taken = []
    for name, page in pages.items():
        for look in ("light", "dark"):
            tab.look(dark=look == "dark")
            tab.open(page)
            tab.until(ready)
            taken.append(tab.screenshot(folder / f"{name}-{look}.png", whole=whole))
    return taken


@contextmanager
def explorers() -> Iterator[dict[str, Path]]:
    """Explorer pages to look at."""
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        scripts = {
            f"explorer-{name}": [hard(4)[place]]
            for place, name in enumerate(("english", "arabic", "hebrew", "chinese", "markup"))
        }
        pages = {"explorer": many(40, 300, 4), **scripts}
        yield {name: write_explorer(folder / f"{name}.html", pairs) for name, pairs in pages.items()}


def main(given: Sequence[str]) -> None:
    """Takes all pictures and prints their names."""
    folder, *others = map(Path, given)
    with browser() as tab, explorers() as pages:
        taken = take(tab, pages, folder, ready="document.documentElement.dataset.ready", whole=False)
        taken += take(tab, {page.stem: page for page in others}, folder)
    for path in taken:
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
