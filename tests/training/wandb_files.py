"""Reads what an offline W&B run has recorded, and keeps W&B away from the home folder."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def keep_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives W&B a home below ``folder``, without an account and without settings from outside."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(folder / "home"))
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(folder / "no-netrc"))
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "true")  # W&B recommends Weave where another test has imported openai


def records(session: Path, patience: float = 300.0) -> list[Any]:
    """All records of a finished session; W&B's service writes the last ones moments after the run's end."""
    until = time.monotonic() + patience
    while True:
        found = list(read_records(next(session.glob("*.wandb")).read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        assert time.monotonic() < until, f"{session} was never finished"
        time.sleep(0.02)


def read_records(data: bytes) -> Iterator[Any]:
    """The records of W&B's file: blocks of 32 KiB, each record in one or more chunks."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, text = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + size > len(data):
            return  # still being written
        text += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield Record.FromString(text)
            text = b""


def sessions(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def values(items: Any) -> dict[str, Any]:
    return {"/".join([item.key] if item.key else item.nested_key): json.loads(item.value_json) for item in items}


def rows(session: Path) -> list[dict[str, Any]]:
    return [values(record.history.item) for record in records(session) if record.WhichOneof("record_type") == "history"]


def only(session: Path, kind: str) -> Any:
    return next(getattr(record, kind) for record in records(session) if record.WhichOneof("record_type") == kind)
