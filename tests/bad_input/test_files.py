"""Data files that are empty, broken, of another kind, or have other columns."""

import csv
import gzip
import io
import json
import shutil
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input.attempts import Attempts
from tests.bad_input.conftest import Record
from tests.run.worlds import TRAIN

NOT_STARTED = "run not started"


def lines(attempts: Attempts) -> list[bytes]:
    return [json.dumps(row).encode() for row in attempts.rows]


def test_missing_columns_name_what_is_there_and_the_options(attempts: Attempts, record: Record) -> None:
    renamed = {"chosen": "good", "rejected": "bad"}
    rows = [{renamed.get(key, key): value for key, value in row.items()} for row in attempts.rows]
    message = attempts.weigh(world=attempts.with_rows(rows)).refused()
    assert 'has no column "chosen", "rejected"; columns found: bad, good, messages, prompt' in message
    assert message.endswith("Set the column names with data.columns.chosen=COLUMN data.columns.rejected=COLUMN")
    assert attempts.weigh(
        "data.columns.chosen=good",
        "data.columns.rejected=bad",
        "data.val_split=train",
        "data.val_rows=0:3",
        world=attempts.with_rows(rows),
    ).noted("(train)", f"{TRAIN} kept")
    record("columns with other names", message, NOT_STARTED)


def test_columns_of_the_wrong_type(attempts: Attempts, record: Record) -> None:
    world = attempts.with_rows([{"prompt": "p", "chosen": 1, "rejected": 2.5}] * 4)
    message = attempts.weigh(world=world).refused()
    assert "4 rows read, 0 kept, 4 dropped; content is not text: 4 (rows 0, 1, 2, ...)" in message
    record("columns of numbers", message, NOT_STARTED)


@pytest.mark.parametrize(("case", "content"), [("empty file", b""), ("file of blank lines", b"\n \n\n")])
def test_a_file_without_rows(attempts: Attempts, record: Record, case: str, content: bytes) -> None:
    message = attempts.weigh(world=attempts.content(content)).refused()
    assert message.endswith("train.jsonl is empty; expected one row per line")
    record(case, message, NOT_STARTED)


def test_a_file_that_was_cut_off(attempts: Attempts, record: Record) -> None:
    content = b"\n".join(lines(attempts))
    message = attempts.weigh(world=attempts.content(content[: len(content) // 2])).refused()
    assert "train.jsonl, line 6 is not JSON (Unterminated string" in message
    assert message.endswith("If the file was truncated, write or copy it again")
    record("JSON that breaks off", message, NOT_STARTED)


def test_a_broken_line_in_the_middle(attempts: Attempts, record: Record) -> None:
    rows = lines(attempts)
    rows[4] = rows[4][:-30]
    message = attempts.weigh(world=attempts.content(b"\n".join(rows))).refused()
    assert "train.jsonl, line 5 is not JSON" in message
    record("JSON with a broken line", message, NOT_STARTED)


@pytest.mark.parametrize(
    ("case", "line", "held"),
    [("a line that is a text", b'"good"', "str 'good'"), ("a line that is a number", b"3", "int '3'"),
     ("a line that is a list", b'["a", "b"]', "list \"['a', 'b']\"")],
)  # fmt: skip
def test_a_line_that_is_no_object(attempts: Attempts, record: Record, case: str, line: bytes, held: str) -> None:
    message = attempts.weigh(world=attempts.content(b"\n".join([*lines(attempts), line]))).refused()
    assert f"train.jsonl, line {TRAIN + 1} contains {held}; expected one JSON object per row" in message
    record(case, message, NOT_STARTED)


def test_a_file_in_another_encoding(attempts: Attempts, record: Record) -> None:
    content = b"\n".join(lines(attempts)).decode().encode("utf-16")
    message = attempts.weigh(world=attempts.content(content)).refused()
    assert "train.jsonl, line 1 is not JSON" in message and "in UTF-8" in message
    record("a file in UTF-16", message, NOT_STARTED)


def test_zero_bytes_after_the_rows(attempts: Attempts, record: Record) -> None:
    """What a full disk or a crash leaves at the end of a file."""
    content = b"\n".join([*lines(attempts), b"\0\0\0\0"])
    message = attempts.weigh(world=attempts.content(content)).refused()
    assert f"train.jsonl, line {TRAIN + 1} is not JSON" in message
    record("zero bytes at the end of a file", message, NOT_STARTED)


READ_IN_FULL = {
    "a byte order mark": ("train.jsonl", lambda rows: b"\xef\xbb\xbf" + b"\n".join(rows)),
    "lines that end in CR LF": ("train.jsonl", lambda rows: b"\r\n".join(rows) + b"\r\n"),
    "an array of rows": ("train.json", lambda rows: b"[" + b",\n".join(rows) + b"]"),
    "compressed rows": ("train.jsonl.gz", lambda rows: gzip.compress(b"\n".join(rows))),
    "NaN in a further column": (
        "train.jsonl",
        lambda rows: b"\n".join(row.replace(b'"score_chosen": ', b'"score_chosen": NaN, "x": ') for row in rows),
    ),
}


@pytest.mark.parametrize("case", READ_IN_FULL)
@pytest.mark.parametrize("surrogate", [False, True], ids=["all rows sound", "one row lost"])
def test_files_that_are_read_in_full(attempts: Attempts, record: Record, case: str, surrogate: bool) -> None:
    """A lone surrogate costs its own row, also beside rows of messages, where a columnar reader made it ""."""
    name, make = READ_IN_FULL[case]
    rows = lines(attempts)
    if surrogate:
        rows.append(b'{"prompt": "p", "chosen": "\\ud800", "rejected": "b"}')
    message = attempts.weigh(world=attempts.content(make(rows), name)).noted("(train)", "rows read,")
    assert f"{TRAIN + surrogate} rows read, {TRAIN} kept, {int(surrogate)} dropped" in message
    if not surrogate:
        record(case, message.partition("(train): ")[2], "nothing")


def test_a_sheet_with_an_empty_and_a_ragged_row(attempts: Attempts, record: Record) -> None:
    """The same pairs as texts in CSV: read and judged; one cell empty, the row is counted; one too many, refused."""
    held = io.StringIO()
    sheet = csv.writer(held)
    sheet.writerow(["prompt", "chosen", "rejected"])
    sheet.writerows(
        [row["prompt"], row["chosen"][-1]["content"], row["rejected"][-1]["content"]] for row in attempts.rows
    )
    sheet.writerow(["p", "", "b"])
    message = attempts.weigh(world=attempts.content(held.getvalue().encode(), "train.csv")).noted(
        "(train)", "rows read,"
    )
    assert message.endswith(
        f"{TRAIN + 1} rows read, {TRAIN} kept, 1 dropped; value is missing: 1 (row {TRAIN}); rows are numbered from 0"
    )
    record("CSV with an empty cell", message.partition("(train): ")[2], "1 pair, counted")
    sheet.writerow(["p", "a", "b", "c"])
    message = attempts.weigh(world=attempts.content(held.getvalue().encode(), "train.csv")).refused()
    assert f"train.csv, the row ending on line {TRAIN + 3} has 4 cells but the first line names 3 columns" in message
    record("CSV with a row too long", message, NOT_STARTED)


def test_rows_whose_columns_change_their_type(attempts: Attempts, record: Record) -> None:
    """A score that is a number here and a text there is nobody's business; a row without a column holds null."""
    rows: list[dict[str, Any]] = [dict(row) for row in attempts.rows]
    rows[1]["topic"] = 3
    rows[2]["topic"] = ["a"]
    del rows[3]["rejected"]
    message = attempts.weigh(world=attempts.with_rows(rows)).noted("(train)", "rows read,")
    assert message.endswith(
        f"{TRAIN} rows read, {TRAIN - 1} kept, 1 dropped; value is missing: 1 (row 3); rows are numbered from 0"
    )
    record("a column of mixed types, a key left out", message.partition("(train): ")[2], f"1 of {TRAIN} pairs, counted")


# ------------------------------------------------------------------------------------------------ parquet


def parquet(attempts: Attempts, table: pa.Table | bytes) -> Any:
    folder = attempts.new("data")
    folder.mkdir()
    shutil.copy(attempts.world.data / "test.jsonl", folder)
    if isinstance(table, bytes):
        (folder / "train.parquet").write_bytes(table)
    else:
        pq.write_table(table, folder / "train.parquet")
    return attempts.on(data=folder)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        ("Parquet with numbers", pa.array([1, 2])),
        ("Parquet with bytes", pa.array([b"x", b"y"])),
        ("Parquet with lists of texts", pa.array([["x"], ["y"]])),
        ("Parquet with dates", pa.array([0, 1], pa.timestamp("s"))),
    ],
)
def test_parquet_of_other_types(attempts: Attempts, record: Record, case: str, chosen: pa.Array) -> None:
    table = pa.table({"prompt": ["a", "b"], "chosen": chosen, "rejected": ["c", "d"]})
    message = attempts.weigh(world=parquet(attempts, table)).refused()
    assert "has no usable pairs: 2 rows read, 0 kept, 2 dropped; " in message
    assert "content is not text: 2 (rows 0, 1)" in message or "malformed conversation: 2 (rows 0, 1)" in message
    record(case, message, NOT_STARTED)


def test_parquet_with_nulls_and_other_kinds_of_text(attempts: Attempts, record: Record) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a", "b", "c"]).dictionary_encode(),
            "chosen": pa.array(["good", None, "the seat"], pa.large_string()),
            "rejected": pa.array(["bad", "bad", "bad"]),
        }
    )
    message = attempts.weigh(world=parquet(attempts, table)).noted("(train)", "rows read,")
    assert message.endswith("3 rows read, 2 kept, 1 dropped; value is missing: 1 (row 1); rows are numbered from 0")
    record("Parquet with nulls", message.partition("(train): ")[2], "1 of 3 pairs, counted")


def test_parquet_with_text_that_is_no_utf8(attempts: Attempts, record: Record) -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\3\0\0\0")
    broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"ab\xff")])
    table = pa.table({"prompt": ["p"], "chosen": broken, "rejected": ["b"]})
    message = attempts.weigh(world=parquet(attempts, table)).refused()
    assert "train.parquet cannot be read as Parquet: Invalid UTF8 sequence" in message
    record("Parquet with text that is not UTF-8", message, NOT_STARTED)


def test_parquet_that_is_none(attempts: Attempts, record: Record) -> None:
    message = attempts.weigh(world=parquet(attempts, b"PAR1 and then nothing")).refused()
    assert "train.parquet cannot be read as Parquet" in message
    record("a file that is no Parquet", message, NOT_STARTED)


def damaged(content: bytes) -> bytes:
    """Compressed bytes of which eight are flipped in the middle, where zlib notices before the checksum does."""
    for begin in range(len(content) // 2, len(content) - 16):
        flipped = bytes(255 - byte for byte in content[begin : begin + 8])
        broken = content[:begin] + flipped + content[begin + 8 :]
        try:
            gzip.decompress(broken)
        except zlib.error:
            return broken
        except (OSError, EOFError):
            continue
    raise AssertionError("no damage that zlib notices")


def test_compressed_rows_with_flipped_bytes(attempts: Attempts, record: Record) -> None:
    """An error of zlib is neither an OSError nor an early end."""
    content = damaged(gzip.compress(b"\n".join(lines(attempts))))
    message = attempts.weigh(world=attempts.content(content, "train.jsonl.gz")).refused()
    assert "train.jsonl.gz cannot be read (Error -3 while decompressing data: " in message
    assert message.endswith("write or copy it again")
    record("compressed rows with flipped bytes", message, NOT_STARTED)


def test_compressed_rows_that_were_cut_off(attempts: Attempts, record: Record) -> None:
    whole = gzip.compress(b"\n".join(lines(attempts)))
    message = attempts.weigh(world=attempts.content(whole[: len(whole) // 2], "train.jsonl.gz")).refused()
    assert "train.jsonl.gz cannot be read (Compressed file ended before" in message
    record("compressed rows that break off", message, NOT_STARTED)
