"""Data of a language model: texts or token ids at `data.dir`, and their tokenizer."""

from __future__ import annotations

import codecs
import hashlib
import io
import pickle
import re
import string
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import DataError, format_count
from halfstep_train.data.cache_file import CacheWriter, fingerprint_files, open_or_write
from halfstep_train.data.files import (
    TRAIN_NAMES,
    VALIDATION_NAMES,
    Array,
    BadFiles,
    list_files,
    list_some,
    make_natural_key,
    require_folder,
)
from halfstep_train.data.loader import make_generator
from halfstep_train.workloads.base.workload import OpenedData
from halfstep_train.workloads.language.config import LanguageConfig, get_context
from halfstep_train.workloads.language.tokenizers import (
    TIKTOKEN,
    Bytes,
    Characters,
    Tiktoken,
    Tokenizer,
    has_tokenizer,
    have_different_ids,
    identify,
    read_tokenizer,
    restore_tokenizer,
)

# --- texts and token ids ---
#
# Texts are UTF-8 documents of a file or a folder in natural order, split for validation. Ids are memory-mapped.
#
# A training epoch passes once over the tokens in windows of `context` tokens. The first window starts at a position
# drawn from (seed, epoch), so windows differ between epochs, and a sample is a pure function of (seed, epoch, index).
# Validation starts at the first token and predicts every other token exactly once; the last window is padded with
# targets of -1, which do not count.
#
# Ids come from three kinds of files. `train.bin` and `val.bin` of nanoGPT are 16-bit ids and nothing else, with a
# `meta.pkl` in the same folder if the tokens are characters. Shards of llm.c (`*_train_*.bin`, `*_val_*.bin`) begin
# with 256 32-bit numbers: a magic number, a version, the number of ids. Our token cache (see cache_file.py) holds the
# ids of a tokenised text, first of the training split, then of the validation split. Its index holds their number and
# width.


PROSE = (".txt", ".text", ".md", ".rst", ".tex")
CODE = (".html", ".xml", ".py", ".c", ".h", ".cpp", ".js", ".java", ".rs")
"""Read only if a folder has no prose: otherwise such files are scripts or pages about the texts."""
NO_WORD = re.compile(r"[\W_\d]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """The files of both splits."""

    root: Path
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    cut: float = 0.0
    """If there is a single file, the fraction at its end that is used for validation."""
    source: str = ""
    """Where the validation split comes from, for the run's header."""
    unread: tuple[Path, ...] = ()
    """Files that are not read: code and markup among prose, and files that are in no split."""

    @property
    def all(self) -> tuple[Path, ...]:
        return self.train + self.val

    def iterate_documents(self, part: str) -> Iterator[tuple[Path, str]]:
        """Yield the texts of `train` or `val` with their paths."""
        if self.cut:
            text = read_text(self.train[0])
            end = int(len(text) * (1 - self.cut))
            yield self.train[0], (text[:end] if part == "train" else text[end:])
            return
        for path in self.train if part == "train" else self.val:
            yield path, read_text(path)


def find_texts(root: Path, *, val_fraction: float, bad_files: BadFiles) -> TextFiles:
    """Find the texts at `root`: a file, a folder with named splits, or a folder whose last texts become validation."""
    if root.is_file():
        _check_texts([root], BadFiles("error"))
        return _use_one_file(root, root, val_fraction)
    prose, code = (list_files(root, endings, recursive=True) for endings in (PROSE, CODE))
    endings = PROSE if prose else CODE
    train, val = _find_named_part(root, TRAIN_NAMES, endings), _find_named_part(root, VALIDATION_NAMES, endings)
    if not train and not val:
        words = [_find_by_word(prose or code, names) for names in (TRAIN_NAMES, VALIDATION_NAMES)]
        train, val = words if all(words) else ([], [])  # only one of them may be a book about trains
    if val and not train:
        train = [path for path in prose or code if path not in val]
    used = {*train, *val} if train else {*(prose or code)}
    unread = tuple(path for path in (*prose, *code) if path not in used)
    if train and val:
        train, val = _check_texts(train, bad_files), _check_texts(val, bad_files)
        source = val[0].name if len(val) == 1 else f"{val[0].relative_to(root).parts[0]}, {len(val)} files"
        return TextFiles(root=root, train=tuple(train), val=tuple(val), source=source, unread=unread)
    files = _check_texts(train or prose or code, bad_files)  # if there is a training split, other files describe it
    if not files:
        ids = next(root.rglob("*.bin"), None)
        raise DataError(
            f"no text in {root}",
            why="no file ends in " + " ".join(PROSE + CODE),
            fix=f"--data-dir {ids.parent}, for token ids" if ids else "give a text file or a folder: --data-dir PATH",
        )
    found = _use_one_file(root, files[0], val_fraction) if len(files) == 1 else _split_files(root, files, val_fraction)
    return replace(found, unread=unread)


def read_text(path: Path) -> str:
    """Return the text of a file; raise DataError if it is empty or not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        likely = "utf-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
        raise DataError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start:,}",
            why="it is in another encoding, or not text",
            fix=f"iconv -f {likely} -t utf-8 {path.name}, if it is {likely}; in a folder, data.on_bad_file=skip",
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}", why=error.strerror or str(error)) from error
    if text.count("\0") > len(text) / 4:
        raise DataError(
            f"{path} is not UTF-8 text: every second or third character is 0",
            why="it is UTF-16, or not text",
            fix=f"iconv -f utf-16le -t utf-8 {path.name}, if it is UTF-16; in a folder, data.on_bad_file=skip",
        )
    if not text.strip():
        raise DataError(
            f"{path} is empty",
            why="it contains no text to train on",
            fix="remove it, or fill it; in a folder, data.on_bad_file=skip",
        )
    return text


def _use_one_file(root: Path, file: Path, val_fraction: float) -> TextFiles:
    source = f"the last {100 * val_fraction:.3g}% of {file.name}" if val_fraction else "none"
    return TextFiles(root=root, train=(file,), val=(), cut=val_fraction, source=source)


def _split_files(root: Path, files: list[Path], val_fraction: float) -> TextFiles:
    """Use whole documents for validation: the end of a document whose beginning was trained on would score too well."""
    if not val_fraction:
        return TextFiles(root=root, train=tuple(files), val=(), source="none")
    total = sum(path.stat().st_size for path in files)
    num, size = 0, 0
    while num < len(files) - 1 and (size < total * val_fraction or num == 0):
        num += 1
        size += files[-num].stat().st_size
    train, val = tuple(files[:-num]), tuple(files[-num:])
    last = format_count(num, "file") if num > 1 else "file"
    source = f"the last {last}, {size / total:.0%} of the bytes: {list_some(val, 2)}"
    return TextFiles(root=root, train=train, val=val, source=source)


def _find_named_part(root: Path, names: tuple[str, ...], endings: tuple[str, ...]) -> list[Path]:
    for name in names:
        if (root / name).is_dir():
            return list_files(root / name, endings, recursive=True)
        if files := [root / f"{name}{ending}" for ending in endings if (root / f"{name}{ending}").is_file()]:
            return files
    return []


def _find_by_word(files: list[Path], names: tuple[str, ...]) -> list[Path]:
    """Return the files whose names contain one of these words, as in `ptb.train.txt` and `ptb.valid.txt`."""
    found = ([path for path in files if name in NO_WORD.split(path.stem.lower())] for name in names)
    return next(filter(None, found), [])


def _check_texts(files: list[Path], bad_files: BadFiles) -> list[Path]:
    """Read all files before anything is written; return those that are text, and report the others."""

    def check(path: Path) -> None:
        read_text(path)

    good = [path for path, _ in bad_files.try_each(check, files)]
    bad_files.refuse_empty_split("a split", len(files), len(good))
    return good


UNCOUNTED = -1
"""Target of padding, which does not count in the loss."""
PRINTABLE = np.frombuffer(string.printable.encode(), dtype=np.uint8)
PHASE_STREAM = 0x7068617365
"""Distinguishes the draw of an epoch's first token from others with the same key ("phase" in ASCII)."""


class Tokens:
    """Several arrays of ids, such as the shards of a data set, read as one sequence."""

    def __init__(self, parts: Sequence[Array], *, paths: Sequence[Path] = ()) -> None:
        self.parts, self.paths = [part for part in parts if len(part)], tuple(paths)
        self.ends = np.cumsum([len(part) for part in self.parts]).tolist()

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.ends else 0

    def read(self, start: int, count: int) -> Array:
        """Return `count` ids from `start` on, as int64."""
        found = []
        while count > 0:
            # The array that holds `start`, and the position inside it.
            number = bisect_right(self.ends, start)
            part, inside = self.parts[number], start - (self.ends[number - 1] if number else 0)
            ids = np.asarray(part[inside : inside + count], dtype=np.int64)
            found.append(ids)
            start, count = start + len(ids), count - len(ids)
        return found[0] if len(found) == 1 else np.concatenate(found)


class TokenSamples:
    """Samples: windows of `context` tokens, with the next tokens as targets."""

    def __init__(self, tokens: Tokens, *, context: int, vocab: int, is_training: bool) -> None:
        self.tokens, self.context, self.vocab, self.is_training = tokens, context, vocab, is_training
        num_targets = len(tokens) - 1
        # A training epoch starts up to context - 1 tokens late; the number of windows must not depend on that.
        self.num = (num_targets - context + 1) // context if is_training else -(-num_targets // context)
        if is_training and num_targets >= context:
            self.num = max(self.num, 1)
        self.num = max(self.num, 0)

    def __len__(self) -> int:
        return self.num

    def files(self) -> Iterable[Path]:
        return self.tokens.paths

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return self._cut_window(self._draw_phase(key[0], key[1]) + index * self.context)

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        phase = self._draw_phase(seed, epoch)
        rows = [self._cut_window(phase + index * self.context) for index in indices.tolist()]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _draw_phase(self, seed: int, epoch: int) -> int:
        """Return the first token of an epoch."""
        room = min(self.context, len(self.tokens) - self.num * self.context)
        if not self.is_training or room <= 1:
            return 0
        return int(torch.randint(room, (), generator=make_generator(seed, epoch, PHASE_STREAM)))

    def _cut_window(self, start: int) -> dict[str, Tensor]:
        """Return tokens and targets of the window at `start`, padded at the end of the data."""
        ids = self.tokens.read(start, min(self.context + 1, len(self.tokens) - start))
        refuse_past_vocabulary(ids, self.vocab, start=start)
        missing = self.context + 1 - len(ids)
        tokens, targets = ids[:-1], ids[1:]
        if missing:
            tokens, targets = np.pad(tokens, (0, missing)), np.pad(targets, (0, missing), constant_values=UNCOUNTED)
        return {"tokens": torch.from_numpy(tokens.copy()), "targets": torch.from_numpy(targets.copy())}


def refuse_past_vocabulary(ids: Array, vocab: int, *, start: int = 0, source: str = "the data") -> None:
    """Raise DataError if an id is not in the vocabulary."""
    if len(ids) and int(ids.max()) >= vocab:
        at = int(np.argmax(ids >= vocab))
        raise DataError(
            f"{source} has token {int(ids[at]):,} at position {start + at:,}, past the vocabulary of {vocab:,}",
            why="the ids come from another tokenizer, or the file contains something other than 16-bit ids",
            fix="set data.tokenizer to the one that made these ids, or model.vocab if there is none",
        )


HEADER_NUMBERS = 256
LLMC: dict[int, tuple[int, Any]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""File version and type of ids by llm.c's magic number, for GPT-2 and for Llama 3."""
LOOKED_AT = 2**26
"""Number of ids per file that are compared with the vocabulary before training; the rest is checked when it is read."""


def find_token_files(root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]] | None:
    """Return the `.bin` files of a folder for training and validation, or a single one; None if there are none."""
    if root.is_file():
        return ((root,), ()) if root.suffix == ".bin" else None
    binary = sorted(root.glob("*.bin"), key=lambda path: make_natural_key(path.name))
    train = tuple(path for path in binary if "train" in path.name)
    val = tuple(path for path in binary if "val" in path.name and "train" not in path.name)
    # A .bin among texts is something else.
    has_texts = not val and any(path.suffix.lower() in PROSE for path in root.iterdir())
    if binary and not train and not has_texts:
        raise DataError(
            f"{root} has {binary[0].name} but no training file",
            why="files are recognised by `train` and `val` in their names",
            fix="name them train.bin and val.bin",
        )
    return (train, val) if train else None


def open_tokens(paths: Sequence[Path], *, vocab: int) -> Tokens:
    """Open files of ids as one sequence; raise DataError if their first ids exceed the vocabulary."""
    parts = [open_ids(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        refuse_past_vocabulary(np.asarray(part[:LOOKED_AT]), vocab, source=str(path))
    return Tokens(parts, paths=paths)


def open_ids(path: Path) -> np.ndarray[Any, Any]:
    """Memory-map the ids of a file; check the header if it has one (llm.c)."""
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty", fix="write it again")
    if size >= 4 * HEADER_NUMBERS:
        magic, version, count = (int(number) for number in np.fromfile(path, dtype=np.int32, count=3))
        if magic in LLMC:
            return _open_shard(path, size, magic, version, count)
    # Recognise common mistakes by the first ids: text, or ids of 32 bits. In ids, every other byte is small.
    first, mistake = np.fromfile(path, dtype=np.uint16, count=4096), ""
    if size % 2:
        mistake = f"has {size:,} bytes, an odd number"
    elif len(first) > 64 and np.isin(first.view(np.uint8), PRINTABLE).mean() > 0.75:
        mistake = f"seems to contain text: {first.tobytes()[:20].decode(errors='replace')!r}"
    elif len(first) > 64 and not first[1::2].any() and first[::2].any():
        mistake = "seems to contain 32-bit ids: every second 16-bit one is 0"
    if mistake:
        raise DataError(
            f"{path} {mistake}",
            why="a .bin without llm.c's header is read as 16-bit ids, as nanoGPT writes them",
            fix=f"np.array(ids, dtype=np.uint16).tofile(path), or name a text {path.stem}.txt",
        )
    return np.memmap(path, dtype=np.uint16, mode="r")


def _open_shard(path: Path, size: int, magic: int, version: int, count: int) -> np.ndarray[Any, Any]:
    """Memory-map the ids of an llm.c shard after checking its header."""
    known, kind = LLMC[magic]
    begin, itemsize = 4 * HEADER_NUMBERS, np.dtype(kind).itemsize
    if version != known:
        raise DataError(f"{path} has version {version} of llm.c's format", why=f"only version {known} is supported")
    if size != begin + count * itemsize:
        raise DataError(
            f"{path} contains {(size - begin) // itemsize:,} ids, but its header claims {count:,}",
            why="it is incomplete, or was modified later",
            fix="copy it again, or create it again",
        )
    return np.memmap(path, dtype=kind, mode="r", offset=begin, shape=(count,))


def read_nanogpt_tokenizer(folder: Path) -> Tokenizer | None:
    """Read the characters of nanoGPT's meta.pkl, if there is one; only plain values are unpickled."""
    path = folder / "meta.pkl"
    if not path.is_file():
        return None
    try:
        meta = _PlainValues(io.BytesIO(path.read_bytes())).load()
        alphabet = [meta["itos"][number] for number in range(len(meta["itos"]))]
        is_single = all(isinstance(one, str) and len(one) == 1 for one in alphabet)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, IndexError, ValueError, OSError) as error:
        raise DataError(
            f"cannot read {path}", why=str(error), fix="write it again with nanoGPT's prepare.py"
        ) from error
    if not is_single or alphabet != sorted(set(alphabet)):
        raise DataError(f"{path} does not list single characters in order", fix="data.tokenizer, or remove the file")
    return Characters("".join(alphabet))


class _PlainValues(pickle.Unpickler):
    """An unpickler that refuses all classes, so that no code can run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains an object ({module}.{name}); only plain values are read")


TOKENISED_AT_ONCE = 2**22
"""Number of characters."""
CUT = re.compile(r"\S\n(?=\S)")
"""Where a text may be cut without changing its tokens: words of BPE do not span a single line break between letters."""


def open_or_tokenise(texts: TextFiles, tokenizer: Tokenizer, path: Path) -> tuple[Tokens, Tokens]:
    """Return the ids of both splits from the cache at `path`; write it first if necessary."""
    settings = {"tokenizer": identify(tokenizer), "cut": texts.cut}
    made_from = fingerprint_files(texts.root, (texts.train, texts.val), settings)
    file, _ = open_or_write(path, "token cache", made_from, lambda writer: _write_tokens(texts, tokenizer, writer))
    kind, (num_train, num_val) = np.dtype(file.index["dtype"]), file.index["counts"]
    train = file.map(kind, (num_train,))
    val = file.map(kind, (num_val,), start=num_train * kind.itemsize)
    return Tokens([train], paths=(path,)), Tokens([val], paths=(path,))


def choose_cache_path(root: Path, tokenizer: Tokenizer) -> Path:
    """Return the default path of the cache: a hidden file next to the texts."""
    folder, name = (root, root.name) if root.is_dir() else (root.parent, root.name)
    return folder / f".{name}-{hashlib.sha256(identify(tokenizer).encode()).hexdigest()[:8]}.tokens"


def _write_tokens(texts: TextFiles, tokenizer: Tokenizer, file: CacheWriter) -> None:
    kind, ends = _choose_dtype(tokenizer), [0]
    for part in ("train", "val"):
        for ids in _encode(texts, tokenizer, part):
            file.write(ids.astype(kind).tobytes())
        ends.append(file.num_bytes // kind.itemsize)
    file.index = {"dtype": kind.name, "counts": [ends[1], ends[2] - ends[1]]}


def tokenise(texts: TextFiles, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """Return the ids of both splits in memory, without a cache."""
    kind = _choose_dtype(tokenizer)
    train, val = (
        np.concatenate([np.empty(0, kind), *(ids.astype(kind) for ids in _encode(texts, tokenizer, part))])
        for part in ("train", "val")
    )
    return Tokens([train]), Tokens([val])


def _choose_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.num_tokens <= 2**16 else np.uint32)


def _encode(texts: TextFiles, tokenizer: Tokenizer, part: str) -> Iterator[np.ndarray[Any, Any]]:
    """Yield ids of a split, a few at a time. The end token separates documents, unless a single one is split."""
    for source, text in texts.iterate_documents(part):
        for section in _split_text(text):
            yield tokenizer.encode(section, source=str(source))
        if tokenizer.end is not None and not texts.cut:
            yield np.array([tokenizer.end])


def _split_text(text: str) -> Iterator[str]:
    """Yield sections of a long text, cut where tokens do not change."""
    start = 0
    while len(text) - start > TOKENISED_AT_ONCE and (cut := CUT.search(text, start + TOKENISED_AT_ONCE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


CHARACTERS = ("characters", "chars", "char")


def open_language_data(config: LanguageConfig, store: Mapping[str, Any] | None = None) -> OpenedData:
    """Open the texts or ids at `data.dir` as samples, with the vocabulary and the tokenizer in the store.

    The `store` of an earlier run contains its tokenizer. A new run refuses a training text that is shorter than one
    sample."""
    root = require_folder(config.data.dir, or_file=True)
    known = load_stored_tokenizer(store)
    files = find_token_files(root)
    data = _open_texts(config, root, known) if files is None else _open_ids(config, root, files, known, store)
    num_tokens, context = len(data.train.tokens), get_context(config)
    if store is None and num_tokens <= context:
        shorter = (num_tokens - 1) // 8
        raise DataError(
            f"the training text has {num_tokens:,} tokens, but one sample needs {context:,} + 1",
            why="a sample is a window of model.context tokens and the token after each",
            fix=f"model.context={shorter}, or more text" if shorter >= 8 else "more text",
        )
    return data


def _make_data(
    config: LanguageConfig, train: Tokens, val: Tokens, vocab: int, tokenizer: Tokenizer | None, **told: Any
) -> OpenedData:
    """Cut both splits into samples. Without a tokenizer the model can be trained, but cannot write text."""
    cut = partial(TokenSamples, context=get_context(config), vocab=vocab)
    store = {"vocab": vocab, "tokenizer": tokenizer.to_dict() if tokenizer else None}
    return OpenedData(train=cut(train, is_training=True), val=cut(val, is_training=False), store=store, **told)


def load_stored_tokenizer(store: Mapping[str, Any] | None) -> Tokenizer | None:
    """Return the tokenizer of a run, if it has one."""
    stored = (store or {}).get("tokenizer")
    return restore_tokenizer(stored) if stored else None


def _open_texts(whole: LanguageConfig, root: Path, known: Tokenizer | None) -> OpenedData:
    """Tokenise texts, or open their cache."""
    config = whole.data
    bad_files = BadFiles(config.on_bad_file)
    texts = find_texts(root, val_fraction=config.val_fraction, bad_files=bad_files)
    # A resumed run keeps its tokenizer, which was compared with that of its start weights when it began; then the
    # setting, the data and the start weights are asked, in this order.
    theirs = None if known else _read_weights_tokenizer(whole)
    named = known or _find_named_tokenizer(config.tokenizer, root) or (theirs if config.tokenizer == "auto" else None)
    is_by_character = config.tokenizer in CHARACTERS
    tokenizer = named or (Characters.from_texts(map(read_text, texts.all)) if is_by_character else Bytes())
    if theirs is not None and have_different_ids(tokenizer, theirs):
        raise DataError(
            f"{whole.model.weights} was trained with another tokenizer: {theirs.name}, {theirs.num_tokens:,} tokens",
            why=f"it is next to the weights; {tokenizer.name}, {tokenizer.num_tokens:,} tokens, assigns different ids",
            fix="leave out data.tokenizer to use theirs",
        )
    path = Path(config.cache_file) if config.cache_file else choose_cache_path(root, tokenizer)
    train, val = open_or_tokenise(texts, tokenizer, path) if config.cache else tokenise(texts, tokenizer)
    notes = bad_files.notes
    if texts.unread:
        names = list_some((path.relative_to(root).as_posix() for path in texts.unread), 3)
        notes = (*notes, f"not read: {format_count(len(texts.unread), 'other file')}: {names}")
    location = f"cached in {path}" if config.cache else "in memory"
    text = f"{format_count(len(texts.all), 'file')}, {_describe_sizes(train, val)}; validation: {texts.source}"
    return _make_data(
        whole,
        train,
        val,
        tokenizer.num_tokens,
        tokenizer,
        about=(("text", text), ("tokenizer", f"{tokenizer.name}, {tokenizer.num_tokens:,} tokens; {location}")),
        notes=notes,
    )


def _open_ids(
    config: LanguageConfig,
    root: Path,
    files: tuple[Sequence[Path], ...],
    known: Tokenizer | None,
    store: Mapping[str, Any] | None,
) -> OpenedData:
    """Open files of token ids."""
    folder = root if root.is_dir() else root.parent
    tokenizer = (
        known
        or _find_named_tokenizer(config.data.tokenizer, root)
        or read_nanogpt_tokenizer(folder)
        or (_read_weights_tokenizer(config) if config.data.tokenizer == "auto" else None)
    )
    theirs = _read_tokenizer_near(root) or read_nanogpt_tokenizer(folder)
    if tokenizer is not None and theirs is not None and theirs.to_dict() != tokenizer.to_dict():
        raise DataError(
            f"the ids in {folder} were made with another tokenizer: {theirs.name}, {theirs.num_tokens:,} tokens",
            why=f"it is stored next to them; the model's is {tokenizer.name}, {tokenizer.num_tokens:,} tokens",
            fix="give the text itself, or ids made with the model's tokenizer",
        )
    # Ids without a tokenizer are taken for GPT-2's, as nanoGPT's prepare.py writes them: 50,257 tokens.
    vocab = int((store or {}).get("vocab", 0)) or (tokenizer.num_tokens if tokenizer else config.model.vocab or 50257)
    train, val = (open_tokens(paths, vocab=vocab) for paths in files)
    num_files = format_count(sum(map(len, files)), "file")
    named = f"{tokenizer.name}, {vocab:,} tokens" if tokenizer else f"none: {vocab:,} ids without their text"
    return _make_data(
        config,
        train,
        val,
        vocab,
        tokenizer,
        about=(("token ids", f"{num_files}, {_describe_sizes(train, val)}"), ("tokenizer", named)),
        notes=() if files[1] else (f"there is no validation: data.dir={root} contains no .bin with `val` in its name",),
    )


def _find_named_tokenizer(setting: str, root: Path) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names; for `auto`, the one stored next to the data.

    Return None if the tokenizer has to be built from the text.
    """
    if setting == "auto":
        return _read_tokenizer_near(root)
    if setting in CHARACTERS:
        return None
    if setting == "bytes":
        return Bytes()
    if setting.startswith(TIKTOKEN):
        return Tiktoken(setting.removeprefix(TIKTOKEN))
    return read_tokenizer(Path(setting))


def _read_weights_tokenizer(config: LanguageConfig) -> Tokenizer | None:
    """Return the tokenizer next to the start weights, whose embedding has one row per token of it."""
    return _read_tokenizer_near(Path(config.model.weights)) if config.model.weights else None


def _read_tokenizer_near(path: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder, or next to a file, if there is one."""
    folder = path if path.is_dir() else path.parent
    return read_tokenizer(folder) if has_tokenizer(folder) else None


def is_weights_tokenizer(tokenizer: Tokenizer | None, config: LanguageConfig) -> bool:
    """True if a tokenizer is the one next to the start weights."""
    theirs = _read_weights_tokenizer(config)
    return tokenizer is not None and theirs is not None and identify(theirs) == identify(tokenizer)


def _describe_sizes(train: Tokens, val: Tokens) -> str:
    return f"{len(train):,} + {len(val):,} tokens"
