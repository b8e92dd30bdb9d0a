"""Folders that save_to_disk wrote, one table shared out between training and validation, CSV and TSV files."""

import gzip
import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnpo.config.compose import load
from attnpo.data.adapters import Columns, Reason
from attnpo.data.base import PairSet, PairSource
from attnpo.data.prompts import PromptSource
from attnpo.schema import UserError

ROWS = [{"prompt": f"question {place // 2}", "chosen": f"good {place}", "rejected": "bad"} for place in range(20)]


def prompts(found: PairSet) -> list[str]:
    return [pair.prompt[0]["content"] for pair in found.pairs]


# ------------------------------------------------------------------------------------------------ saved folders


@pytest.fixture(autouse=True, scope="module")
def library_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A data set with two splits, saved by the library that users save it with."""
    import datasets

    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    table = datasets.Dataset.from_list([{**row, "messages": turns} for row in ROWS])
    both = datasets.DatasetDict({"train_prefs": table.select(range(16)), "test_prefs": table.select(range(16, 20))})
    both.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_data_set_is_read_by_its_splits(saved: Path) -> None:
    source = PairSource(str(saved), train_split="train_prefs", val_split="test_prefs", val_rows="2")
    assert [pair.chosen for pair in source.load("train").pairs] == [f"good {place}" for place in range(16)]
    assert [pair.chosen for pair in source.load("val").pairs] == ["good 16", "good 17"]
    assert len(PromptSource(str(saved), split="test_prefs").load().prompts) == 2


def test_a_wrong_split_gives_near_names(saved: Path) -> None:
    with pytest.raises(UserError) as refused:
        PairSource(str(saved)).load("val")
    assert str(refused.value) == (
        f"data.val_split=test: the dataset saved in {saved} has the splits train_prefs, test_prefs; did you mean "
        "data.val_split=test_prefs? Choose one with data.val_split=NAME, or split the training data with "
        "data.val_share=0.1"
    )
    with pytest.raises(UserError, match=r"did you mean data\.train_split=train_prefs\?"):
        PairSource(str(saved), train_split="train_perfs").load("train")


def test_a_saved_table_without_splits_is_like_one_file(saved: Path) -> None:
    path = str(saved / "train_prefs")
    assert len(PairSource(path).load("train")) == 16
    with pytest.raises(
        UserError,
        match=r"is a single table, so its rows must be split into training and validation sets: set data\.val_share",
    ):
        PairSource(path).load("val")
    source = PairSource(path, val_share=0.25)
    assert (len(source.load("train")), len(source.load("val"))) == (12, 4)


def test_a_damaged_folder_names_what_to_do(saved: Path) -> None:
    source = PairSource(str(saved), train_split="train_prefs")
    arrow = next((saved / "train_prefs").glob("*.arrow"))
    content = arrow.read_bytes()
    arrow.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"train_prefs cannot be read as a saved dataset .*save or copy it again"):
        source.load("train")
    shutil.rmtree(saved / "train_prefs")
    with pytest.raises(UserError, match="train_prefs cannot be read as a saved dataset"):
        source.load("train")
    (saved / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match=r"dataset_dict\.json cannot be read \(KeyError"):
        source.load("train")


def test_a_saved_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).select([]).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"cannot be read as a saved dataset .*complete, non-empty dataset"):
        PairSource(str(tmp_path / "empty")).load("train")


# ------------------------------------------------------------------------------------------------ data.val_share


def one_file(folder: Path, rows: list[dict[str, str]], name: str = "pairs.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def test_a_share_of_the_prompts_is_kept_for_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = PairSource(one_file(tmp_path, ROWS), val_share=0.3)
    with caplog.at_level(logging.INFO):
        train, val = source.load("train"), source.load("val")
    assert "data.val_share=0.3: 3 of 10 prompts (6 of 20 rows) are selected by digest for validation" in caplog.text
    assert "data.train_rows overlap" not in caplog.text
    assert not {*prompts(train)} & {*prompts(val)} and len({*prompts(val)}) == 3
    assert (train.read, val.read) == (14, 6)
    assert sorted(pair.chosen for pair in [*train.pairs, *val.pairs]) == sorted(row["chosen"] for row in ROWS)


def test_the_order_of_the_rows_moves_no_prompt(tmp_path: Path) -> None:
    rows = random.Random(0).sample(ROWS, len(ROWS))
    first, second = (PairSource(one_file(tmp_path, order), val_share=0.3).load("val") for order in (ROWS, rows))
    assert {*prompts(first)} == {*prompts(second)}


def test_responses_that_change_places_stay_on_their_side(tmp_path: Path) -> None:
    path = one_file(tmp_path, ROWS)
    plain, exchanged = (PairSource(path, val_share=0.3, exchanged=asked).load("val") for asked in (False, True))
    assert prompts(plain) == prompts(exchanged)


def test_rows_are_chosen_of_either_share_and_keep_their_numbers(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "question 0", "chosen": "a", "rejected": "a"}]
    source = PairSource(one_file(tmp_path, rows), val_share=0.3, train_rows="10:", val_rows="2")
    assert len(source.load("val")) == 2
    assert source.load("train").examples == {"identical responses": [20]}


def test_either_side_has_a_prompt_at_least(tmp_path: Path) -> None:
    for share, held in ((0.01, 1), (0.99, 9)):
        source = PairSource(one_file(tmp_path, ROWS), val_share=share)
        assert len({*prompts(source.load("val"))}) == held
    with pytest.raises(UserError, match=r"the 2 rows have only 1: use data with more prompts"):
        PairSource(one_file(tmp_path, ROWS[:2]), val_share=0.5).load("train")


@pytest.mark.parametrize("share", [0, 1.0, 10])
def test_a_share_is_between_0_and_1(share: float) -> None:
    asked = ["setting=real_smoke", "model.path=unset", "data.path=unset", f"data.val_share={share}"]
    with pytest.raises(UserError, match=r"expected a share of the prompts between 0 and 1") as refused:
        load("fit", asked)
    assert ("such as 0.1 for 10 %" in str(refused.value)) == (share == 10)


@pytest.mark.parametrize("split", ["test", "validation", "nowhere"])
def test_a_share_goes_without_a_validation_split(tmp_path: Path, split: str) -> None:
    for name in ("train", split):
        one_file(tmp_path, ROWS, f"{name}.jsonl")
    source = PairSource(str(tmp_path), val_split=split, val_share=0.3)
    with pytest.raises(UserError, match=rf"data\.val_split={split}: set only one of them; .* data\.val_split=null"):
        source.load("train")
    assert len(PairSource(str(tmp_path), val_split=None, val_share=0.3).load("train")) == 14
    with pytest.raises(UserError, match=r"data\.val_split=null: name the validation split, or set data\.val_share"):
        PairSource(str(tmp_path), val_split=None).load("val")


def test_a_folder_with_a_training_split_alone_is_shared_out(tmp_path: Path) -> None:
    one_file(tmp_path, ROWS, "train.jsonl")
    assert len(PairSource(str(tmp_path), val_share=0.3).load("val")) == 6
    with pytest.raises(UserError, match=r"data\.val_split=test: set only one of them"):
        PairSource("hub/name", val_share=0.3).load("train")


# ----------------------------------------------------------------------------------- CSV and TSV


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
    assert found.examples == {Reason.MISSING.value: [1, 2]} and (found.num_kept, found.num_dropped) == (2, 2)
    assert found.pairs[1].chosen == "NaN"
    assert "1 rows have a cell containing only NaN, null, None or N/A (first: row 3)" in caplog.text


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
        (HEADER + b"p,a,b\np,a\n", "the row ending on line 3 has 2 cells but the first line names 3 columns"),
        (HEADER + b"p,a,b, and more\n", "the row ending on line 2 has 4 cells"),
        (HEADER + b'p,"a,b\n', r"line 2 cannot be read \(unexpected end of data\): put cells that contain quotes"),
        (HEADER + b'p,"a"b,c\n', "line 2 cannot be read"),
        (b"p,a,b\nq,c,d\n", r'the first line of data.path=.*has no column "chosen", "rejected"; .* found: a, b, p;'),
        (b"prompt,chosen,chosen\np,a,b\n", "line 1 repeats chosen: give every column a unique name"),
        (b"prompt,,rejected\np,a,b\n", "line 1 has no name for column 2: the first line must name every column"),
        (b"prompt;chosen;rejected\np;a;b\n", "line 1: fields are separated by semicolons, not commas: save the file"),
        (b"prompt\tchosen\trejected\np\ta\tb\n", r"separated by tabs, not commas: .*, or name it \.tsv"),
        (HEADER + "p,caf\xe9,b\n".encode("latin-1"), r'line 2 is not UTF-8 \(byte 0xe9\): .* "CSV UTF-8"'),
        ((HEADER + b"p,a,b\n").decode().encode("utf-16"), r"line 1 is not UTF-8 \(byte 0xff\)"),
        (HEADER + b"p,a,b\n\0\0\0\0", "the row ending on line 3 has 1 cells"),
        (b"prompt,completion,label\np,a,true\n", "These are single labelled responses, as in KTO"),
        (
            HEADER + b"p,\"[{'role': 'assistant', 'content': 'a'}]\",\"[{'role': 'assistant', 'content': 'b'}]\"\n",
            r"messages are stored as one string: 1 \(row 0\)",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_says_where_and_what_to_do(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, content)


def test_files_of_a_split_have_one_header(tmp_path: Path) -> None:
    for part, header in enumerate(("prompt,chosen,rejected", "prompt,rejected,chosen")):
        (tmp_path / f"train-0000{part}-of-00002.csv").write_text(f"{header}\np,a,b\n")
    with pytest.raises(
        UserError, match="the first file has prompt, chosen, rejected: all files of a split need the same"
    ):
        PairSource(str(tmp_path)).load("train")
    (tmp_path / "train-00001-of-00002.csv").write_text("prompt,chosen,rejected\nq,c,d\n")
    assert texts(PairSource(str(tmp_path)).load("train")) == [("p", "a", "b"), ("q", "c", "d")]
