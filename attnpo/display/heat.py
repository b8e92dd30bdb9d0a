"""Safe display of text, and the colours of heat maps.

Colours show weight relative to uniform (w * |y|) on a fixed logarithmic scale, which makes maps comparable: no tint at
1, warm colours above (up to 8), cool colours below (down to 1/8).
"""

import math
import unicodedata

LEVELS = 16  # shades on each side of uniform
OCTAVES = 3.0  # the scale ends at 2^3 = 8 times uniform, and at 1/8
DARK_INK = 9  # from this shade on, the tint needs dark text even on a dark page

WEIGHTS = ("relative", "weight")  # columns of a pair that are coloured

RGBA = tuple[int, int, int, float]
RGB = tuple[int, int, int]

LEGEND: tuple[tuple[str, float], ...] = (
    ("0", 0.0), ("1/4", 0.25), ("1/2", 0.5), ("1", 1.0), ("2", 2.0), ("4", 4.0), ("8 or more", 8.0)
)  # fmt: skip


_MARKS = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}


def make_visible(text: str) -> str:
    """Makes ``text`` safe to display, with marks for line breaks and tabs.

    Control characters become Unicode control pictures, so escape sequences never reach a terminal. Bidirectional
    control characters become e.g. [U+202E], and lone surrogates become the replacement character. In a string of only
    spaces, the spaces become visible.
    """
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(_show_character(char) for char in text)


def make_readable(text: str) -> str:
    """Makes ``text`` safe to display like ``make_visible``, but with plain line breaks and spaces, for prompts."""
    return "\n".join("".join(_show_character(char) for char in line) for line in text.split("\n"))


def _show_character(char: str) -> str:
    if char in _MARKS:
        return _MARKS[char]
    code, kind = ord(char), unicodedata.category(char)
    if kind == "Cc":
        return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"
    if kind == "Cs":
        return "\ufffd"
    if kind in ("Zl", "Zp") or code in (0x200E, 0x200F, 0x061C) or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"[U+{code:04X}]"
    return char


# ------------------------------------------------------------------------------------------------ colours


def shade_of(relative: float | int) -> int:
    """Returns the shade of a weight relative to uniform, from -16 (1/8 or less) to 16 (8 or more); 0 for uniform.

    Negative weights have the shade of their absolute value; NaN has shade 0.
    """
    size = abs(relative)
    if math.isnan(size):
        return 0
    if size == 0:
        return -LEVELS
    return round(LEVELS * max(-1.0, min(1.0, math.log2(size) / OCTAVES))) if math.isfinite(size) else LEVELS


def get_tint(shade: int, negative: bool = False) -> RGBA:
    """Returns a shade's red, green, blue (0-255) and opacity (0-1), for any background."""
    share = abs(shade) / LEVELS
    if negative:
        return 150, 80, 205, 0.12 + 0.68 * (shade + LEVELS) / (2 * LEVELS)
    if shade > 0:
        return 255 - round(15 * share), 178 - round(92 * share), 66 - round(48 * share), 0.10 + 0.85 * share
    return 70, 130, 215, 0.30 * share


def blend(colour: RGBA, background: RGB) -> RGB:
    """Blends ``colour`` with an opaque ``background``."""
    red, green, blue, opacity = colour
    mixed = [
        round(opacity * top + (1 - opacity) * below) for top, below in zip((red, green, blue), background, strict=True)
    ]
    return mixed[0], mixed[1], mixed[2]


def shade_class(relative: float) -> str:
    """Returns the CSS class of a finite weight, defined by ``shade_rules``."""
    return f"{'v' if relative < 0 else 'h'}{shade_of(relative) + LEVELS}"


def shade_rules(scope: str = "", signed: bool = True) -> str:
    """Returns the CSS rules for all shades within the selector ``scope``; ``signed`` includes negative weights."""
    rules = []
    for prefix, negative in (("h", False), ("v", True))[: 2 if signed else 1]:
        for shade in range(-LEVELS, LEVELS + 1):
            red, green, blue, opacity = get_tint(shade, negative)
            ink = ";color:#1b1205" if shade >= DARK_INK and not negative else ""
            rules.append(
                f"{scope}.{prefix}{shade + LEVELS}{{background:rgba({red},{green},{blue},{opacity:.3f}){ink}}}"
            )
    return "\n".join(rules)
