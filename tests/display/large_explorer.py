"""The explorer at its full size in a browser, by `make browser`: 500 pairs of 700 tokens, two sources, four layers.

A pair's 700 tokens are those of both responses; each layer has the combined round and two single ones.
"""

import sys
from pathlib import Path

from attnpo.display.explorer import write_explorer
from tests.display.browser import browser
from tests.display.explored import many

LIMIT = 15_000_000  # bytes
OPENS = 3.0  # seconds from the start of navigation until the first pair is painted
SWITCHES = 1.0  # seconds from a choice until its pair and list are drawn


def test_a_large_page_opens_and_switches_in_time(tmp_path: Path) -> None:
    page = write_explorer(tmp_path / "explorer.html", many(500, 700, 4))
    size = page.stat().st_size
    assert size <= LIMIT
    with browser() as tab:
        tab.look()
        tab.call("Performance.setTimeDomain", timeDomain="threadTicks")
        tab.call("Performance.enable")
        tab.open(page)
        tab.until("document.documentElement.dataset.ready", wait=120)
        opened = tab.value("performance.getEntriesByName('drawn')[0].startTime") / 1000
        worked = {one["name"]: one["value"] for one in tab.call("Performance.getMetrics")["metrics"]}["TaskDuration"]
        switched = []
        for name, value in (("layer", "L4"), ("round", "round 2"), ("source", "rollout"), ("sort", "disagreement")):
            before = "document.querySelector('#pair').textContent + document.querySelector('#spacer').innerHTML"
            tab.value(f"window.before = {before}; window.began = performance.now();")
            tab.value(
                f"document.getElementById({name!r}).value = {value!r};"
                f"document.getElementById({name!r}).dispatchEvent(new Event('change'));"
            )
            tab.value(
                "new Promise(done => { const look = () => "
                f"window.before === {before} ? setTimeout(look, 5) : done(); look(); }})"
            )
            switched.append(tab.value("performance.now() - window.began") / 1000)
        assert tab.problems == [] and tab.requests == [page.as_uri()]
    measured = (
        f"explorer of 500 pairs: {size / 1e6:.1f} MB, first pair painted {opened:.2f} s after the start of navigation "
        f"({worked:.2f} s of processor time of the page's thread), "
        f"choices drawn after at most {max(switched):.2f} s"
    )
    sys.stdout.write(f"\n{measured}\n")
    assert opened < OPENS and max(switched) < SWITCHES
