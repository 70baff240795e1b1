"""Data of a language model: texts or token ids at `data.dir`, and their tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import DataError, format_count
from halfstep_train.data.files import BadFiles, list_some, require_folder
from halfstep_train.workloads.language.config import LanguageConfig
from halfstep_train.workloads.language.texts import (
    Tokens,
    choose_cache_path,
    find_texts,
    find_token_files,
    open_or_tokenise,
    open_tokens,
    read_nanogpt_tokenizer,
    read_text,
    tokenise,
)
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

CHARACTERS = ("characters", "chars", "char")


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageData:
    """Token ids of both splits, and their tokenizer."""

    train: Tokens
    val: Tokens
    vocab: int
    tokenizer: Tokenizer | None
    """None for files of ids without a tokenizer: the model can be trained, but cannot write text."""
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def open_language_data(config: LanguageConfig, store: Mapping[str, Any] | None = None) -> LanguageData:
    """Open the texts or ids at `data.dir`; the `store` of an earlier run contains its tokenizer."""
    root = require_folder(config.data.dir, or_file=True)
    known = load_stored_tokenizer(store)
    if (files := find_token_files(root)) is not None:
        return _open_ids(config, root, files, known, store)
    return _open_texts(config, root, known)


def load_stored_tokenizer(store: Mapping[str, Any] | None) -> Tokenizer | None:
    """Return the tokenizer of a run, if it has one."""
    stored = (store or {}).get("tokenizer")
    return restore_tokenizer(stored) if stored else None


def _open_texts(whole: LanguageConfig, root: Path, known: Tokenizer | None) -> LanguageData:
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
    return LanguageData(
        train=train,
        val=val,
        vocab=tokenizer.num_tokens,
        tokenizer=tokenizer,
        about=(("text", text), ("tokenizer", f"{tokenizer.name}, {tokenizer.num_tokens:,} tokens; {location}")),
        notes=notes,
    )


def _open_ids(
    config: LanguageConfig,
    root: Path,
    files: tuple[Sequence[Path], ...],
    known: Tokenizer | None,
    store: Mapping[str, Any] | None,
) -> LanguageData:
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
    return LanguageData(
        train=train,
        val=val,
        vocab=vocab,
        tokenizer=tokenizer,
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
