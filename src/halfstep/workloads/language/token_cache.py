"""Texts tokenised once into one file, which training maps into memory.

    8 bytes "hstoken1" · ids of the training part · ids of the validation part · JSON · 8 bytes: length of the JSON

The JSON says how many ids of how many bytes there are, from which texts (names, sizes, times) and by which tokenizer
they come, and a CRC-32 for each 16 MiB. The file appears when it is complete. One that was made from other texts or by
another tokenizer is made again; a damaged one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from halfstep.data.files import naming_no_room, refuse_no_room
from halfstep.disk import atomic_file, parse_json, take_turn
from halfstep.errors import DataError
from halfstep.workloads.language.text_files import TextFiles
from halfstep.workloads.language.tokenizers import Tokenizer, identity
from halfstep.workloads.language.tokens import Tokens

MAGIC = b"hstoken1"
ENDING = ".tokens"
CHECKED_BYTES = 2**24
"""Of one CRC."""
CHECKED_BLOCKS = 64
"""Blocks whose CRC is compared when a file is opened: all of them up to 1 GiB, else as many, spread over the file."""
PIECE = 2**22
"""Characters that are tokenised at once."""
CUT = re.compile(r"\S\n(?=\S)")
"""Where a text may be cut without changing its tokens: BPE's words never span a lone line break."""


def open_or_tokenise(texts: TextFiles, tokenizer: Tokenizer, path: Path) -> tuple[Tokens, Tokens]:
    """The ids of both parts, from `path` or into it."""
    wanted = {"texts": _fingerprint(texts), "tokenizer": _digest(identity(tokenizer)), "cut": texts.cut}
    with take_turn(path):
        if not path.exists() or _header(path)["made_from"] != wanted:
            _write(texts, tokenizer, path, wanted)
    return _opened(path, _header(path))


def default_cache(root: Path, tokenizer: Tokenizer) -> Path:
    """Beside the texts, hidden."""
    folder, name = (root, root.name) if root.is_dir() else (root.parent, root.name)
    return folder / f".{name}-{_digest(identity(tokenizer))[:8]}{ENDING}"


def _write(texts: TextFiles, tokenizer: Tokenizer, path: Path, made_from: dict[str, Any]) -> None:
    kind = _kind_for(tokenizer)
    with naming_no_room(path, "the token cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A guess on the low side, as a token of most texts stands for four bytes or more; a full disk is an error too.
        refuse_no_room(path, sum(file.stat().st_size for file in texts.all) * kind.itemsize // 4, "the token cache")
        with atomic_file(path, follows_links=True) as hidden, hidden.open("wb") as file:
            file.write(MAGIC)
            counts, checks = _write_ids(file, texts, tokenizer, kind)
            header = {"dtype": kind.name, "counts": counts, "checks": checks, "made_from": made_from}
            encoded = json.dumps(header).encode()
            file.write(encoded + len(encoded).to_bytes(8, "little"))


class _CheckedFile:
    """Bytes into a file, in blocks whose CRCs are noted."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.rest, self.checks, self.num_bytes = file, bytearray(), list[int](), 0

    def write(self, data: bytes) -> None:
        self.rest += data
        self.num_bytes += len(data)
        while len(self.rest) >= CHECKED_BYTES:
            self._put(CHECKED_BYTES)

    def close(self) -> list[int]:
        if self.rest:
            self._put(len(self.rest))
        return self.checks

    def _put(self, length: int) -> None:
        block = bytes(self.rest[:length])
        self.file.write(block)
        self.checks.append(zlib.crc32(block))
        del self.rest[:length]


def _write_ids(
    file: BinaryIO, texts: TextFiles, tokenizer: Tokenizer, kind: np.dtype[Any]
) -> tuple[list[int], list[int]]:
    """How many ids each part has, and the CRCs of all bytes."""
    out, ends = _CheckedFile(file), [0]
    for part in ("train", "val"):
        for ids in _encoded(texts, tokenizer, part):
            out.write(ids.astype(kind).tobytes())
        ends.append(out.num_bytes // kind.itemsize)
    return [ends[1], ends[2] - ends[1]], out.close()


def tokenised(texts: TextFiles, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """The same in memory, for a text that is read once."""
    kind = _kind_for(tokenizer)
    train, val = (
        np.concatenate([np.empty(0, kind), *(ids.astype(kind) for ids in _encoded(texts, tokenizer, part))])
        for part in ("train", "val")
    )
    return Tokens([train]), Tokens([val])


def _kind_for(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.num_tokens <= 2**16 else np.uint32)


def _encoded(texts: TextFiles, tokenizer: Tokenizer, part: str) -> Iterator[np.ndarray[Any, Any]]:
    """Piece by piece; documents are parted by their end, unless both parts are of the same one."""
    for source, text in texts.documents(part):
        for piece in _pieces(text):
            yield tokenizer.encode(piece, source=str(source))
        if tokenizer.end is not None and not texts.cut:
            yield np.array([tokenizer.end])


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE and (cut := CUT.search(text, start + PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _header(path: Path) -> dict[str, Any]:
    begin = b""
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
            size = file.seek(0, os.SEEK_END)
            file.seek(-8, os.SEEK_END)
            length = int.from_bytes(file.read(8), "little")
            if begin != MAGIC or length > size:
                raise ValueError("it does not begin or end as one")
            file.seek(-8 - length, os.SEEK_END)
            header: dict[str, Any] = parse_json(file.read(length))
        ids = sum(header["counts"]) * np.dtype(header["dtype"]).itemsize
        if size != len(MAGIC) + ids + length + 8:
            raise ValueError(f"it has {size:,} bytes and should have {len(MAGIC) + ids + length + 8:,}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        # What neither begins nor is named as one of ours may be anything, and dear to somebody.
        is_ours = begin == MAGIC or path.suffix == ENDING
        fix = "remove it: it is made again" if is_ours else "another place: data.cache_file=FILE that is not there yet"
        raise DataError(f"{path} is not a token cache", why=str(error), fix=fix) from error
    return header


def _opened(path: Path, header: dict[str, Any]) -> tuple[Tokens, Tokens]:
    _check_blocks(path, header)
    kind, (num_train, num_val) = np.dtype(header["dtype"]), header["counts"]
    parts = []
    for start, count in ((0, num_train), (num_train, num_val)):
        offset = len(MAGIC) + start * kind.itemsize
        ids = np.memmap(path, dtype=kind, mode="r", offset=offset, shape=(count,)) if count else np.empty(0, kind)
        parts.append(Tokens([ids], paths=(path,)))
    return parts[0], parts[1]


def _check_blocks(path: Path, header: dict[str, Any]) -> None:
    checks: list[int] = header["checks"]
    num = min(len(checks), CHECKED_BLOCKS)
    total = sum(header["counts"]) * np.dtype(header["dtype"]).itemsize
    with path.open("rb") as file:
        for number in sorted({index * len(checks) // num for index in range(num)}) if num else ():
            start = number * CHECKED_BYTES
            file.seek(len(MAGIC) + start)
            if zlib.crc32(file.read(min(CHECKED_BYTES, total - start))) != checks[number]:
                raise DataError(
                    f"{path} is damaged: its checksum does not match",
                    why="it was written to, or the disk lost some of it",
                    fix="remove it: it is made again",
                )


def _fingerprint(texts: TextFiles) -> str:
    entries = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in texts.all]
    return _digest(repr((len(texts.train), entries)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
