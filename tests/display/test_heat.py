"""Heat maps: what they say, that nothing in the data can act, and where tokens come from."""

import io
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from attnpo.data.collate import TrainingExample
from attnpo.display.heat import blend, get_tint, make_readable, make_visible, shade_of
from attnpo.display.heatmap import heatmap_html, heatmap_terminal, write_svg
from attnpo.display.pair_record import Verdict
from attnpo.display.weighted_pair import WeightedPair, pair_with_weights
from attnpo.schema import EncodedResponse, JudgeRound, Message, PairWeights, PreferencePair, TokenWeights, UserError
from tests.display.sides import END, pair_of, response

VOID = {"meta", "br", "img"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not close in order."""

    def __init__(self, code: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[tuple[str, str | None, str]] = []
        self.text = ""
        self.feed(code)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.seen.append((tag, values))
        assert not any(name.startswith("on") for name in values)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "span":
            self.spans.append((values.get("class") or "", values.get("title"), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.text += data
        if self.open and self.open[-1] == "span":
            kind, title, text = self.spans[-1]
            self.spans[-1] = (kind, title, text + data)

    @property
    def tokens(self) -> list[tuple[str, str, str]]:
        """(class, hover, text) of spans with a hover text."""
        return [(kind, title, text) for kind, title, text in self.spans if title is not None]


def sample(*texts: str, note: str = "attention, layer 1") -> WeightedPair:
    texts = texts or ("Good", " bread", ".\n")
    made = [(text, 0.5 / len(texts)) for text in texts]
    chosen = response(*made, (" lost", 0.0), (" heavy", 0.5), (END, 0.0), length=5.0, coverage=0.8)
    rejected = response(("No", 1.0), cut=" more of it.")
    verdicts = (Verdict(True, (2.0, 0.0), "A"), Verdict(False, (1.0, 0.0)))
    prompt = [Message(role="system", content="Be brief."), Message(role="user", content="How?\nWhy <b>?")]
    return pair_of(chosen, rejected, prompt, verdicts, note, "0123456789abcdef")


# ------------------------------------------------------------------------------------------------ parts


def test_verdict_reads_logits_by_order() -> None:
    sure = 1 / (1 + math.exp(-2))
    assert Verdict(True, (2.0, 0.0)).p_chosen == pytest.approx(sure)
    assert Verdict(False, (2.0, 0.0)).p_chosen == pytest.approx(1 - sure)
    assert Verdict(True, (1e4, -1e4)).p_chosen == 1.0
    assert "a tie" in Verdict(True, (1.0, 1.0)).summary()
    assert Verdict(False).summary() == "chosen is B: verdict not read"
    assert Verdict(True, (2.0, 0.0), " A").summary() == "chosen is A: picks chosen, p(chosen) 0.881, says 'A'"


def test_side_numbers() -> None:
    side = response(("x", 0.5), ("x", 0.25), ("x", 0.25), length=4.0, coverage=0.75)
    assert side.relative.tolist() == [2.0, 1.0, 1.0] and side.num_effective == pytest.approx(1 / 0.375)
    assert side.summary() == "3 tokens, coverage 75.0 %, effective number of weights 2.7"
    told = replace(side, source_coverage=0.5, kept_mass=0.9).summary()
    assert "coverage 75.0 %, source coverage 50.0 %, kept mass 90.0 %, effective" in told
    assert math.isnan(response().num_effective) and math.isnan(response(("x", math.nan)).num_effective)
    assert response(("x", 1.0), cut="twelve chars").summary().endswith("12 characters cut")
    with pytest.raises(UserError, match=r"weight: expected one value per token \(3 tokens\), got 1"):
        replace(side, weights=torch.ones(1))


def test_scale() -> None:
    # A level is a sixteenth of three octaves.
    assert [shade_of(value) for value in (0.0, 0.125, 0.5, 1.0, 2.0, 8.0, 100.0)] == [-16, -16, -5, 0, 5, 16, 16]
    assert shade_of(-2.0) == 5 and shade_of(math.nan) == 0 and shade_of(math.inf) == 16
    assert get_tint(0)[3] == 0.0
    opacities = [get_tint(shade)[3] for shade in range(1, 17)]
    assert opacities == sorted(opacities) and opacities[-1] <= 1
    assert blend((255, 0, 0, 1.0), (0, 0, 0)) == (255, 0, 0) and blend((255, 0, 0, 0.0), (1, 2, 3)) == (1, 2, 3)


def test_visible() -> None:
    assert make_visible("a\n\nb\t") == "a↵\n↵\nb⇥\t"
    assert make_visible("  ") == "␣␣" and make_visible(" a ") == " a " and make_visible("") == ""
    assert make_visible("\x1b[31m\x00\r\x7f") == "␛[31m␀␍[U+007F]"
    assert make_visible("a\u202eb\u2066") == "a[U+202E]b[U+2066]"
    assert make_visible("\ud800x") == "\ufffdx"
    assert make_readable("a\n\n  b\x07") == "a\n\n  b␇"


def test_pair_from_a_training_example() -> None:
    pair = PreferencePair.from_texts([Message(role="user", content="q")], "ab cd é!", "no")
    rows = TokenWeights(torch.tensor([1]), torch.tensor([[0, 1]]), torch.ones(1, 1))
    rounds = (JudgeRound(True, rows, rows, torch.tensor([1.0, 0.0]), 3), JudgeRound(False, rows, rows))
    example = TrainingExample(
        pair.pair_id,
        EncodedResponse([1], [5, 6, 7, 8, 9], [(0, 2), (3, 5), (6, 7), (6, 7), (8, 8)]),
        EncodedResponse([1], [4], [(0, 2)]),
        (torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0]), torch.tensor([1.0])),
        lengths=(4.0, 1.0),
        coverage=(0.75, 1.0),
    )
    made = pair_with_weights(pair, example, lambda token: f"<{token}>", PairWeights(pair.pair_id, rounds))
    # Spaces outside the offsets go with the next token; the second byte of é has no text; "!" was cut off.
    assert made.chosen.tokens == ("ab", " cd", " é", "", "<9>")
    assert made.chosen.matched_flags == (True, False, True, True, False)
    assert made.chosen.end_flags == (False, False, False, False, True)
    assert (made.chosen.num_cut_characters, made.chosen.length, made.rejected.coverage) == (1, 4.0, 1.0)
    assert made.verdicts == (Verdict(True, (1.0, 0.0), "<3>"), Verdict(False, None, None))
    full = replace(example, coverage=(1.0, 1.0))
    assert pair_with_weights(pair, full, str).chosen.matched_flags == (True, True, True, True, False), (
        "0 with a partner"
    )


# ------------------------------------------------------------------------------------------------ HTML


def test_html_says_everything_and_needs_nothing_from_outside() -> None:
    code = heatmap_html([sample()])
    read = Reader(code)
    for part in (
        "pair 0123456789ab", "attention, layer 1", "Be brief.", "Why <b>?", "round 1: chosen is A: picks chosen",
        "round 2: chosen is B: picks rejected", "coverage 80.0 %", "effective number of weights", "12 characters cut",
        "weight relative to uniform",
    ):  # fmt: skip
        assert part in read.text, part
    shown = {text: (kind, (title or "").partition(", weight")[0]) for kind, title, text in read.tokens}
    assert shown[" heavy"] == (f"h{16 + shade_of(2.5)}", "2.50")  # .5 times |y| of 5
    assert shown["Good"] == (f"h{16 + shade_of(5 / 6)}", "0.83")
    assert shown[" lost"] == ("lost", "0.00, no partner")
    assert shown[END] == ("h0 end", "0.00, end of turn")
    assert shown["No"] == ("h16", "1.00") and ".↵\n" in shown
    assert {kind for kind, _, _ in read.spans} >= {"lost", "end", "h0", "h16", "h32"}  # the legend
    assert code.index('class="heat-side chosen"') < code.index('class="heat-side rejected"')
    assert not {tag for tag, _ in read.seen} & {"script", "link", "img", "iframe", "object"}
    assert not any({"src", "href", "action"} & set(attrs) for _, attrs in read.seen)
    assert "url(" not in code and "@import" not in code and "http" not in code
    fragment = heatmap_html([sample()], page=False)
    assert fragment.startswith("<style>") and "<html" not in fragment and fragment in code
    assert "weight relative to uniform" in Reader(heatmap_html([])).text


def test_a_token_says_what_it_is() -> None:
    side = response(("x", 0.5), logp=[-1.25], reference_logp=[-1.5])
    told = Reader(heatmap_html([pair_of(side)])).tokens[0][1]
    assert told == "0.50, weight 0.5, id 7, characters 0 to 1, log-prob: policy -1.250, reference -1.500"


def test_every_class_in_use_has_a_rule() -> None:
    side = response(*(("x", (0.02 if n < 20 else 0.5) * n / 40) for n in range(60)))
    code = heatmap_html([pair_of(side, response(("x", -0.5)))])
    used = {name for kind, _, _ in Reader(code).spans for name in kind.split()} - {"heat-text"}
    assert len(used) > 15
    assert not [name for name in used if f".heat .{name}" not in code]
    assert "negative" in Reader(code).text and "negative" not in Reader(heatmap_html([sample()])).text


HOSTILE = "</span><script>alert('x')</script>&amp;\"'<!--"


def test_html_escapes_every_text() -> None:
    side = response((HOSTILE, 1.0), (HOSTILE, 0.0))
    prompt = [Message(role=HOSTILE, content=HOSTILE)]
    pair = pair_of(side, None, prompt, (Verdict(True, (1, 0), HOSTILE),), HOSTILE, HOSTILE)
    read = Reader(heatmap_html([pair], title=HOSTILE))
    assert "script" not in {tag for tag, _ in read.seen}
    assert read.text.count(HOSTILE) >= 8


@settings(max_examples=15)
@given(st.text(max_size=30).filter(lambda text: text != END))
def test_html_shows_any_token_as_it_is_made_visible(text: str) -> None:
    # Parsers read a carriage return as a line break, which make_visible() never lets through.
    read = Reader(heatmap_html([sample("a", text, "b")], page=False))
    assert read.tokens[1][2] == (make_visible(text) or "▯")


def test_right_to_left_lines_take_their_own_direction() -> None:
    pair = sample("שלום", " עולם", "\n", "latin")
    assert pair.chosen.is_right_to_left and not pair.rejected.is_right_to_left
    code = heatmap_html([pair])
    assert 'dir="auto"' in code and "unicode-bidi:plaintext" in code
    assert [text for _, _, text in Reader(code).tokens[:4]] == ["שלום", " עולם", "↵\n", "latin"]  # logical order


def test_not_finite_weights_are_marked_and_surrogates_can_be_written() -> None:
    code = heatmap_html([pair_of(response(("\ud83d", math.nan), ("🙂", math.inf)))], title="\udc00")
    assert [kind for kind, _, _ in Reader(code).tokens] == ["bad"] * 4
    assert "🙂" in code.encode("utf-8").decode("utf-8")


# ------------------------------------------------------------------------------------------------ terminal


def terminal(pair: WeightedPair, width: int = 120, *, colour: bool = False, numbers: bool | None = None) -> str:
    out = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=system, legacy_windows=False)
    heatmap_terminal([pair], console, numbers=numbers)
    return out.getvalue()


def test_terminal_without_colour_writes_numbers() -> None:
    text = terminal(sample())
    parts = (" heavy|2.50", "Good|0.83", " lost|.", f"{END}|0.00", "coverage 80.0 %", "round 2", "How?", "Why <b>?")
    assert [part for part in parts if part not in text] == []
    assert any("─ chosen" in line and "─ rejected" in line for line in text.splitlines())
    narrow = terminal(sample(), width=80).splitlines()
    assert not any("─ chosen" in line and "─ rejected" in line for line in narrow)
    assert max(map(len, narrow)) <= 80


def test_terminal_with_colour_has_the_scale_and_no_numbers() -> None:
    text = terminal(sample(), colour=True)
    red, green, blue = blend(get_tint(shade_of(2.5)), (24, 26, 31))
    assert f"48;2;{red};{green};{blue}m heavy" in text
    assert "|2.50" not in text and "|2.50" in terminal(sample(), colour=True, numbers=True)


def test_terminal_shows_all_and_never_passes_control_sequences_or_markup() -> None:
    text = terminal(sample("\x1b]0;title\x07", "[bold]x[/bold]", "y" * 300, note="\x1b[2J"))
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]x[/bold]" in text and text.count("y") >= 300 and "…" not in text


def test_a_picture_has_the_shades_and_runs_from_the_right_where_its_text_does(tmp_path: Path) -> None:
    picture = write_svg([sample("שלום", "<b>&", " latin")], tmp_path / "new" / "heat.svg")
    code = picture.read_text(encoding="utf-8")
    places = {(node.text or "").strip(): float(node.get("x", 0)) for node in ElementTree.fromstring(code).iter()}
    assert "#{:02x}{:02x}{:02x}".format(*blend(get_tint(shade_of(2.5)), (255, 255, 255))) in code
    assert places["שלום"] > places["<b>&"] > places["latin"] > places["lost"], "from right to left"
    left = write_svg([sample("word", " <b>&")], tmp_path / "left.svg").read_text(encoding="utf-8")
    found = {(node.text or "").strip(): float(node.get("x", 0)) for node in ElementTree.fromstring(left).iter()}
    assert found["word"] < found["<b>&"] and "http" not in left.replace("http://www.w3.org/2000/svg", "")
