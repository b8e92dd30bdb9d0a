"""CSV and TSV files: what is read, and what is refused with file and line."""

import gzip
import logging
from pathlib import Path

import pytest

from attnpo.data.adapters import Columns, Reason
from attnpo.data.base import PairSet, PairSource
from attnpo.schema import UserError

HEADER = b"prompt,chosen,rejected\n"


def read(tmp_path: Path, content: bytes, name: str = "pairs.csv", columns: Columns | None = None) -> PairSet:
    (tmp_path / name).write_bytes(content)
    return PairSource(str(tmp_path / name), columns=columns or Columns()).load("train")


def texts(found: PairSet) -> list[tuple[str, str, str]]:
    return [(pair.prompt[0]["content"], pair.chosen, pair.rejected) for pair in found.pairs]


SAME = [("Name a colour, please.", 'Red "wine"\nor blue', "Two")]
QUOTED = b'"Name a colour, please.","Red ""wine""\nor blue",Two\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.csv", HEADER + QUOTED),
        ("pairs.csv", b"\xef\xbb\xbf" + HEADER + QUOTED),  # the mark that spreadsheets put first
        ("pairs.csv", HEADER + QUOTED + b"\n\n"),
        ("pairs.csv", b" prompt , chosen,rejected\r\n" + QUOTED),
        ("pairs.csv.gz", gzip.compress(HEADER + QUOTED)),
        ("pairs.tsv", HEADER.replace(b",", b"\t") + b'Name a colour, please.\t"Red ""wine""\nor blue"\tTwo\n'),
        ("pairs.csv", b",prompt,chosen,rejected\n0," + QUOTED),  # the row's number, as pandas writes it
    ],
    ids=["quotes", "byte order mark", "blank lines", "blanks and CR LF", "compressed", "tabs", "row numbers"],
)
def test_texts_are_read_as_they_are(tmp_path: Path, name: str, content: bytes) -> None:
    assert texts(read(tmp_path, content, name)) == SAME


def test_no_cell_is_taken_for_a_number(tmp_path: Path) -> None:
    assert texts(read(tmp_path, HEADER + b"6*7?,42,007\nWhen?,1e3,2024-01-01\n")) == [
        ("6*7?", "42", "007"),
        ("When?", "1e3", "2024-01-01"),
    ]


def test_an_empty_cell_is_missing_and_nan_is_a_text_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path, HEADER + b"a,b,c\nq,,x\nq,y,\nwhat is 0/0?,NaN,1\n")
    assert found.examples == {Reason.MISSING.value: [1, 2]} and (found.kept, found.dropped) == (2, 2)
    assert found.pairs[1].chosen == "NaN"
    assert "1 rows have a cell that is nothing but NaN, null, None or N/A (first: row 3)" in caplog.text


def test_a_cell_may_be_longer_than_the_reader_of_python_allows(tmp_path: Path) -> None:
    long = "word " * 40_000
    assert texts(read(tmp_path, HEADER + f"p,{long},b\n".encode())) == [("p", long, "b")]


def test_further_columns_go_with_the_pair(tmp_path: Path) -> None:
    found = read(tmp_path, b"prompt,chosen,rejected,topic\np,a,b,sky\n")
    assert (found.pairs[0].extra, found.unused) == ({"topic": "sky"}, ("topic",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "pairs.csv is empty"),
        (HEADER, "pairs.csv is empty; expected one row per line"),
        (HEADER + b"p,a,b\np,a\n", "the row that ends in line 3 has 2 cells and the first line names 3 columns"),
        (HEADER + b"p,a,b, and more\n", "the row that ends in line 2 has 4 cells"),
        (HEADER + b'p,"a,b\n', r"line 2 cannot be read \(unexpected end of data\): put a cell that holds quotes"),
        (HEADER + b'p,"a"b,c\n', "line 2 cannot be read"),
        (b"p,a,b\nq,c,d\n", r'the first line of data.path=.*has no column "chosen", "rejected"; .* found: a, b, p;'),
        (b"prompt,chosen,chosen\np,a,b\n", "line 1 names chosen twice: give every column its own name"),
        (b"prompt,,rejected\np,a,b\n", "line 1 names no column 2: expected a name for every column"),
        (b"prompt;chosen;rejected\np;a;b\n", "line 1 is divided by semicolons, expected commas: save it with commas"),
        (b"prompt\tchosen\trejected\np\ta\tb\n", r"divided by tabs, expected commas: .*, or name it \.tsv"),
        (HEADER + "p,caf\xe9,b\n".encode("latin-1"), r'line 2 is not UTF-8 \(byte 0xe9\): .* "CSV UTF-8"'),
        ((HEADER + b"p,a,b\n").decode().encode("utf-16"), r"line 1 is not UTF-8 \(byte 0xff\)"),
        (HEADER + b"p,a,b\n\0\0\0\0", "the row that ends in line 3 has 1 cells"),
        (b"prompt,completion,label\np,a,true\n", "These are single answers with a label, as KTO reads them"),
        (
            HEADER + b"p,\"[{'role': 'assistant', 'content': 'a'}]\",\"[{'role': 'assistant', 'content': 'b'}]\"\n",
            r"messages are written as one text: 1 \(row 0\)",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_says_where_and_what_to_do(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, content)


def test_files_of_a_split_have_one_header(tmp_path: Path) -> None:
    for part, header in enumerate(("prompt,chosen,rejected", "prompt,rejected,chosen")):
        (tmp_path / f"train-0000{part}-of-00002.csv").write_text(f"{header}\np,a,b\n")
    with pytest.raises(UserError, match="the first file has prompt, chosen, rejected: give all files of a split one"):
        PairSource(str(tmp_path)).load("train")
    (tmp_path / "train-00001-of-00002.csv").write_text("prompt,chosen,rejected\nq,c,d\n")
    assert texts(PairSource(str(tmp_path)).load("train")) == [("p", "a", "b"), ("q", "c", "d")]
