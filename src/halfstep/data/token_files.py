"""Files of token ids that other projects write: nanoGPT's and llm.c's.

nanoGPT's `train.bin` and `val.bin` are 16-bit ids and nothing else, with `meta.pkl` beside them where these are
characters. llm.c's shards (`*_train_*.bin`, `*_val_*.bin`) begin with 256 32-bit numbers: a magic one, a version, how
many ids follow.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.data.files import natural_key
from halfstep.data.tokenizers import Characters, Tokenizer
from halfstep.data.tokens import Tokens, refuse_past_vocabulary
from halfstep.errors import DataError

HEADER_NUMBERS = 256
LLMC: dict[int, tuple[int, Any]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""llm.c's magic numbers: version and ids of its files for GPT-2 and for Llama 3."""
LOOKED_AT = 2**26
"""Ids that are compared with the vocabulary before training; the rest as it is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFiles:
    """Training and validation parts of a folder of ids."""

    train: tuple[Path, ...]
    val: tuple[Path, ...]


def find_token_files(root: Path) -> TokenFiles | None:
    """The folder's `.bin` files by what their names say; None where it has none for training."""
    if root.is_file():
        return TokenFiles(train=(root,), val=()) if root.suffix == ".bin" else None
    binary = sorted(root.glob("*.bin"), key=lambda path: natural_key(path.name))
    train = tuple(path for path in binary if "train" in path.name)
    val = tuple(path for path in binary if "val" in path.name and "train" not in path.name)
    if binary and not train:
        raise DataError(
            f"{root} has {binary[0].name} and no training part",
            why="the parts are told apart by `train` and `val` in their names",
            fix="name them train.bin and val.bin",
        )
    return TokenFiles(train=train, val=val) if train else None


def open_tokens(paths: tuple[Path, ...], *, vocab: int) -> Tokens:
    """Files as one sequence; ids that the vocabulary does not have are refused, in the first ones now."""
    parts = [open_ids(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        refuse_past_vocabulary(np.asarray(part[:LOOKED_AT]), vocab, source=str(path))
    return Tokens(parts, paths=paths)


def open_ids(path: Path) -> np.ndarray[Any, Any]:
    """A file's ids, mapped; llm.c's header is checked where there is one."""
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty", fix="write it again")
    if size >= 4 * HEADER_NUMBERS:
        magic, version, count = (int(number) for number in np.fromfile(path, dtype=np.int32, count=3))
        if magic in LLMC:
            return _shard(path, size, magic, version, count)
    if size % 2:
        raise DataError(
            f"{path} has {size:,} bytes, an odd number",
            why="16-bit ids, as nanoGPT writes them, take two bytes each, and llm.c's header is not there",
            fix="write it with numpy: np.array(ids, dtype=np.uint16).tofile(path)",
        )
    ids = np.memmap(path, dtype=np.uint16, mode="r")
    first = np.asarray(ids[:4096])
    if len(first) > 64 and not first[1::2].any() and first[::2].any():
        raise DataError(
            f"{path} seems to hold 32-bit ids: every second 16-bit one is 0",
            why="headerless files are read as 16-bit ids, as nanoGPT writes them",
            fix="write it with numpy: np.array(ids, dtype=np.uint16).tofile(path)",
        )
    return ids


def _shard(path: Path, size: int, magic: int, version: int, count: int) -> np.ndarray[Any, Any]:
    known, kind = LLMC[magic]
    begin, itemsize = 4 * HEADER_NUMBERS, np.dtype(kind).itemsize
    if version != known:
        raise DataError(f"{path} is of version {version} of llm.c's format", why=f"version {known} is read")
    if size != begin + count * itemsize:
        raise DataError(
            f"{path} holds {(size - begin) // itemsize:,} ids, its header says {count:,}",
            why="it is incomplete, or was written to since",
            fix="copy or make it again",
        )
    return np.memmap(path, dtype=kind, mode="r", offset=begin, shape=(count,))


def nanogpt_tokenizer(folder: Path) -> Tokenizer | None:
    """The characters in nanoGPT's meta.pkl, of which nothing but plain values is unpickled."""
    path = folder / "meta.pkl"
    if not path.is_file():
        return None
    try:
        meta = _PlainValues(io.BytesIO(path.read_bytes())).load()
        alphabet = [meta["itos"][number] for number in range(len(meta["itos"]))]
        in_order = all(isinstance(one, str) and len(one) == 1 for one in alphabet) and alphabet == sorted(alphabet)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, IndexError, ValueError, OSError) as error:
        raise DataError(f"cannot read {path}", why=str(error), fix="nanoGPT's prepare.py writes it") from error
    if not in_order:
        raise DataError(f"{path} does not list single characters in order", fix="data.tokenizer, or remove the file")
    return Characters("".join(alphabet))


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds an object ({module}.{name}); only plain values are read")
