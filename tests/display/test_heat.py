"""Heat maps: what they say, that nothing in the data can act, and where tokens come from."""

import io
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attnpo.display.heat import HeatRow, HeatSide, HeatToken, Verdict, heat_row, level, over, readable, tint, visible
from attnpo.display.heatmap import heatmap_html, heatmap_terminal
from attnpo.schema import EncodedResponse, Message, PreferencePair, Round, TokenWeights, UserError

VOID = {"meta", "br", "img"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not close in order."""

    def __init__(self, code: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: set[str] = set()
        self.urls: list[str] = []
        self.spans: list[tuple[str, str | None, str]] = []
        self.text = ""
        self.feed(code)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        assert not any(name.startswith("on") for name in values)
        self.urls += [value or "" for name, value in values.items() if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append((tag, values))
        if tag == "span":
            self.spans.append((values.get("class") or "", values.get("title"), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1][0] == tag, f"</{tag}> inside {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "style":
            return
        self.text += data
        if self.open and self.open[-1][0] == "span":
            kind, title, text = self.spans[-1]
            self.spans[-1] = (kind, title, text + data)

    @property
    def tokens(self) -> list[tuple[str, str, str]]:
        """(class, hover, text) of spans with a hover text."""
        return [(kind, title, text) for kind, title, text in self.spans if title is not None]


def sample(*texts: str, note: str = "attention, layer 1") -> HeatRow:
    texts = texts or ("Good", " bread", ".\n")
    chosen = HeatSide(
        (
            *(HeatToken(text, 0.5 / len(texts)) for text in texts),
            HeatToken(" lost", 0.0, matched=False),
            HeatToken(" heavy", 0.5),
            HeatToken("<|eot|>", 0.0, end=True),
        ),
        length=5.0,
        coverage=0.8,
    )
    rejected = HeatSide((HeatToken("No", 1.0),), cut=12)
    verdicts = (Verdict(True, (2.0, 0.0), "A"), Verdict(False, (1.0, 0.0)))
    prompt = (Message(role="system", content="Be brief."), Message(role="user", content="How?\nWhy <b>?"))
    return HeatRow("0123456789abcdef", prompt, chosen, rejected, verdicts, note)


# ------------------------------------------------------------------------------------------------ parts


def test_verdict_reads_logits_by_order() -> None:
    sure = 1 / (1 + math.exp(-2))
    assert Verdict(True, (2.0, 0.0)).preference == pytest.approx(sure)
    assert Verdict(False, (2.0, 0.0)).preference == pytest.approx(1 - sure)
    assert Verdict(True, (1e4, -1e4)).preference == 1.0
    assert "a tie" in Verdict(True, (1.0, 1.0)).summary()
    assert Verdict(False).summary() == "chosen is B: verdict not read"
    assert Verdict(True, (2.0, 0.0), " A").summary() == "chosen is A: picks chosen, p(chosen) 0.881, says 'A'"


def test_side_numbers() -> None:
    side = HeatSide(tuple(HeatToken("x", weight) for weight in (0.5, 0.25, 0.25)), length=4.0, coverage=0.75)
    assert side.relative(side.tokens[0]) == 2.0
    assert side.effective == pytest.approx(1 / 0.375)
    assert side.summary() == "3 tokens, coverage 75.0 %, effective number of weights 2.7"
    arrived = replace(side, source_coverage=0.5, kept_mass=0.9).summary()
    assert (
        arrived
        == "3 tokens, coverage 75.0 %, source coverage 50.0 %, kept mass 90.0 %, effective number of weights 2.7"
    )
    assert math.isnan(HeatSide(()).effective) and math.isnan(HeatSide((HeatToken("x", math.nan),)).effective)
    assert HeatSide((HeatToken("x", 1.0),), cut=12).summary().endswith("12 characters cut")


def test_scale() -> None:
    # A level is a sixteenth of three octaves.
    assert [level(value) for value in (0.0, 0.125, 0.5, 1.0, 2.0, 8.0, 100.0)] == [-16, -16, -5, 0, 5, 16, 16]
    assert level(-2.0) == 5 and level(math.nan) == 0 and level(math.inf) == 16
    assert over(tint(0), (10, 20, 30))[2] - 30 <= 4  # uniform: hardly a tint
    assert tint(0)[3] == 0.0
    opacities = [tint(shade)[3] for shade in range(1, 17)]
    assert opacities == sorted(opacities) and opacities[-1] <= 1
    assert over((255, 0, 0, 1.0), (0, 0, 0)) == (255, 0, 0) and over((255, 0, 0, 0.0), (1, 2, 3)) == (1, 2, 3)


def test_visible() -> None:
    assert visible("a\n\nb\t") == "a↵\n↵\nb⇥\t"
    assert visible("  ") == "␣␣" and visible(" a ") == " a " and visible("") == ""
    assert visible("\x1b[31m\x00\r\x7f") == "␛[31m␀␍[U+007F]"
    assert visible("a\u202eb\u2066") == "a[U+202E]b[U+2066]"
    assert visible("\ud800x") == "\ufffdx"
    assert readable("a\n\n  b\x07") == "a\n\n  b␇"


# ------------------------------------------------------------------------------------------------ building


def encoded(ids: list[int], offsets: list[tuple[int, int]]) -> EncodedResponse:
    return EncodedResponse([1], ids, offsets)


def test_row_from_a_training_example() -> None:
    pair = PreferencePair.make([Message(role="user", content="q")], "ab cd é!", "no")
    weights = TokenWeights(torch.tensor([1]), torch.tensor([[0, 1]]), torch.ones(1, 1))
    row = heat_row(
        pair,
        (encoded([5, 6, 7, 8, 9], [(0, 2), (3, 5), (6, 7), (6, 7), (8, 8)]), encoded([4], [(0, 2)])),
        (torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0]), torch.tensor([1.0])),
        lambda token: f"<{token}>",
        lengths=(4.0, 1.0),
        coverage=(0.75, 1.0),
        rounds=(Round(True, weights, weights, torch.tensor([1.0, 0.0]), 3), Round(False, weights, weights)),
    )
    # Spaces outside the offsets go with the next token; the second byte of é has no text; "!" was cut off.
    assert [token.text for token in row.chosen.tokens] == ["ab", " cd", " é", "", "<9>"]
    assert [token.matched for token in row.chosen.tokens] == [True, False, True, True, True]
    assert [token.end for token in row.chosen.tokens] == [False] * 4 + [True]
    assert (row.chosen.cut, row.chosen.length, row.rejected.coverage) == (1, 4.0, 1.0)
    assert row.verdicts == (Verdict(True, (1.0, 0.0), "<3>"), Verdict(False, None, None))
    assert row.pair_id == pair.pair_id and row.prompt == pair.prompt


def test_zero_weights_are_matched_where_coverage_is_full() -> None:
    pair = PreferencePair.make([Message(role="user", content="q")], "ab", "no")
    sides = (encoded([1, 2], [(0, 1), (1, 2)]), encoded([1], [(0, 2)]))
    weights = (torch.tensor([0.0, 1.0]), torch.tensor([1.0]))
    full = heat_row(pair, sides, weights, str, coverage=(1.0, 1.0))
    assert all(token.matched for token in full.chosen.tokens)
    assert not heat_row(pair, sides, weights, str).chosen.tokens[0].matched
    with pytest.raises(UserError, match="chosen: expected a weight per training token, got 1 weights for 2"):
        heat_row(pair, sides, (torch.ones(1), torch.ones(1)), str)


# ------------------------------------------------------------------------------------------------ HTML


def test_html_says_everything() -> None:
    read = Reader(heatmap_html([sample()]))
    for part in (
        "pair 0123456789ab", "attention, layer 1", "Be brief.", "Why <b>?", "round 1: chosen is A: picks chosen",
        "round 2: chosen is B: picks rejected", "coverage 80.0 %", "effective number of weights", "12 characters cut",
        "weight relative to uniform",
    ):  # fmt: skip
        assert part in read.text, part
    shown = {text: (kind, title) for kind, title, text in read.tokens}
    assert shown[" heavy"] == (f"h{16 + level(2.5)}", "2.50")  # .5 times |y| of 5
    assert shown["Good"] == (f"h{16 + level(5 / 6)}", "0.83")
    assert shown[" lost"] == ("lost", "0.00, no partner")
    assert shown["<|eot|>"] == ("h0 end", "0.00, end of turn")
    assert ".↵\n" in shown
    assert {kind for kind, _, _ in read.spans} >= {"lost", "end", "h0", "h16", "h32"}  # the legend
    assert shown["No"] == ("h16", "1.00")


def test_html_needs_nothing_from_outside() -> None:
    code = heatmap_html([sample()])
    read = Reader(code)
    assert not read.tags & {"script", "link", "img", "iframe", "object"}
    assert read.urls == [] and "url(" not in code and "@import" not in code and "http" not in code


def test_html_chosen_stands_beside_rejected() -> None:
    code = heatmap_html([sample()])
    assert code.index('class="heat-side chosen"') < code.index('class="heat-side rejected"')
    assert "grid-template-columns:1fr 1fr" in code


def test_every_class_in_use_has_a_rule() -> None:
    row = sample()
    side = HeatSide(tuple(HeatToken("x", (0.02 if n < 20 else 0.5) * n / 40) for n in range(60)))
    code = heatmap_html([HeatRow(row.pair_id, row.prompt, side, HeatSide((HeatToken("x", -0.5),)))])
    used = {name for kind, _, _ in Reader(code).spans for name in kind.split()} - {"heat-text"}
    assert len(used) > 15
    assert not [name for name in used if f".heat .{name}" not in code]
    assert "negative" in Reader(code).text and "negative" not in Reader(heatmap_html([row])).text


HOSTILE = "</span><script>alert('x')</script>&amp;\"'<!--"


def test_html_escapes_every_text() -> None:
    side = HeatSide((HeatToken(HOSTILE, 1.0), HeatToken(HOSTILE, 0.0, end=True)))
    row = HeatRow(
        HOSTILE, (Message(role=HOSTILE, content=HOSTILE),), side, side, (Verdict(True, (1, 0), HOSTILE),), HOSTILE
    )
    read = Reader(heatmap_html([row], title=HOSTILE))
    assert "script" not in read.tags
    assert read.text.count(HOSTILE) >= 8


@given(st.text(max_size=30))
def test_html_shows_any_token_as_it_is_made_visible(text: str) -> None:
    # Parsers read a carriage return as a line break, which visible() never lets through.
    read = Reader(heatmap_html([sample("a", text, "b")]))
    assert read.tokens[1][2] == (visible(text) or "▯")


def test_right_to_left_lines_take_their_own_direction() -> None:
    row = sample("שלום", " עולם", "\n", "latin")
    assert row.chosen.right_to_left and not row.rejected.right_to_left
    code = heatmap_html([row])
    assert 'dir="auto"' in code and "unicode-bidi:plaintext" in code
    assert [text for _, _, text in Reader(code).tokens[:4]] == ["שלום", " עולם", "↵\n", "latin"]  # logical order


def test_fragment_is_the_page_without_its_frame() -> None:
    fragment = heatmap_html([sample()], page=False)
    assert fragment.startswith("<style>") and "<html" not in fragment and fragment in heatmap_html([sample()])
    assert not Reader(fragment).tags & {"html", "body", "head"}


def test_not_finite_weights_are_marked() -> None:
    side = HeatSide((HeatToken("x", math.nan), HeatToken("y", math.inf)))
    read = Reader(heatmap_html([HeatRow("p", (), side, side)]))
    assert [kind for kind, _, _ in read.tokens] == ["bad"] * 4


def test_no_rows() -> None:
    assert "weight relative to uniform" in Reader(heatmap_html([])).text


def test_page_can_be_written_as_utf8(tmp_path: Path) -> None:
    path = tmp_path / "heat.html"
    path.write_text(heatmap_html([sample("\ud83d", "🙂")], title="\udc00"), encoding="utf-8")
    assert "🙂" in path.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ terminal


def terminal(row: HeatRow, width: int = 120, *, colour: bool = False, numbers: bool | None = None) -> str:
    out = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=system, legacy_windows=False)
    heatmap_terminal([row], console, numbers=numbers)
    return out.getvalue()


def test_terminal_without_colour_writes_numbers() -> None:
    text = terminal(sample())
    for part in (
        " heavy|2.50",
        "Good|0.83",
        " lost|.",
        "<|eot|>|0.00",
        "coverage 80.0 %",
        "round 2",
        "How?",
        "Why <b>?",
    ):
        assert part in text, part
    assert any("─ chosen" in line and "─ rejected" in line for line in text.splitlines())
    narrow = terminal(sample(), width=80).splitlines()
    assert not any("─ chosen" in line and "─ rejected" in line for line in narrow)
    assert max(map(len, narrow)) <= 80


def test_terminal_with_colour_has_the_scale_and_no_numbers() -> None:
    text = terminal(sample(), colour=True)
    red, green, blue = over(tint(level(2.5)), (24, 26, 31))
    assert f"48;2;{red};{green};{blue}m heavy" in text
    assert "|2.50" not in text and "|2.50" in terminal(sample(), colour=True, numbers=True)


def test_terminal_never_passes_control_sequences_or_markup() -> None:
    row = sample("\x1b]0;title\x07", "[bold]x[/bold]", note="\x1b[2J")
    text = terminal(row)
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]x[/bold]" in text


def test_terminal_shows_long_tokens_in_full() -> None:
    text = terminal(sample("x" * 300))
    assert text.count("x") >= 300 and "…" not in text
