"""Find and read texts: UTF-8 documents of a file or a folder in natural order, split for validation."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.errors import DataError, format_count
from halfstep_train.data.files import TRAIN_NAMES, VALIDATION_NAMES, BadFiles, list_files, list_some

PROSE = (".txt", ".text", ".md", ".rst", ".tex")
CODE = (".html", ".xml", ".py", ".c", ".h", ".cpp", ".js", ".java", ".rs")
"""Read only if a folder has no prose: otherwise such files are scripts or pages about the texts."""
BYTE_ORDER_MARK = "\ufeff"
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
        text = path.read_bytes().decode("utf-8").removeprefix(BYTE_ORDER_MARK)
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
