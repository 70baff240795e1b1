"""The data of a language model: texts or token ids at `data.dir`, and the tokenizer that goes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.data.files import BadFiles, some_of
from halfstep.errors import DataError, format_count
from halfstep.workloads.language.config import LanguageConfig
from halfstep.workloads.language.text_files import TextFiles, find_texts, read_text
from halfstep.workloads.language.tokenizers import (
    TIKTOKEN,
    Bytes,
    Characters,
    Tiktoken,
    Tokenizer,
    disagree,
    has_tokenizer,
    identity,
    tokenizer_at,
    tokenizer_from,
)
from halfstep.workloads.language.tokens import (
    TokenFiles,
    Tokens,
    default_cache,
    find_token_files,
    nanogpt_tokenizer,
    open_or_tokenise,
    open_tokens,
    tokenised,
)

CHARACTERS = ("characters", "chars", "char")


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageData:
    """Token ids of both parts, and what they mean."""

    train: Tokens
    val: Tokens
    vocab: int
    tokenizer: Tokenizer | None
    """None for files of ids without one: they can be trained on, and not be written."""
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def open_language_data(config: LanguageConfig, store: Mapping[str, Any] | None = None) -> LanguageData:
    """What lies at `data.dir`; `store` of an earlier run brings its tokenizer."""
    if config.data.dir is None:
        raise DataError("no text", why="a language model learns from a text file or a folder", fix="--data-dir PATH")
    root = Path(config.data.dir)
    if not root.exists():
        raise DataError(f"no text at {root}", why="it does not exist", fix="--data-dir: a text file or a folder")
    known = stored_tokenizer(store)
    if (files := find_token_files(root)) is not None:
        return _ids(config, root, files, known, store)
    return _texts(config, root, known)


def stored_tokenizer(store: Mapping[str, Any] | None) -> Tokenizer | None:
    stored = (store or {}).get("tokenizer")
    return tokenizer_from(stored) if stored else None


def _texts(whole: LanguageConfig, root: Path, known: Tokenizer | None) -> LanguageData:
    config = whole.data
    bad_files = BadFiles(config.on_bad_file)
    texts = find_texts(root, val_fraction=config.val_fraction, bad_files=bad_files)
    named = known or _named_tokenizer(config.tokenizer, root) or _of_weights(whole)
    tokenizer = named or _of_texts(config.tokenizer, texts)
    if known is None:
        _refuse_another_than_the_weights(tokenizer, whole)
    path = Path(config.cache_file) if config.cache_file else default_cache(root, tokenizer)
    train, val = open_or_tokenise(texts, tokenizer, path) if config.cache else tokenised(texts, tokenizer)
    place = f"cached in {path}" if config.cache else "in memory"
    return LanguageData(
        train=train,
        val=val,
        vocab=tokenizer.num_tokens,
        tokenizer=tokenizer,
        about=(
            ("text", f"{format_count(len(texts.all), 'file')}, {_in_words(train, val)}; validation: {texts.source}"),
            ("tokenizer", f"{tokenizer.name}, {tokenizer.num_tokens:,} tokens; {place}"),
        ),
        notes=(*bad_files.notes, *_not_read(texts)),
    )


def _not_read(texts: TextFiles) -> Iterator[str]:
    if texts.beside:
        names = some_of((path.relative_to(texts.root).as_posix() for path in texts.beside), 3)
        yield f"not read: {format_count(len(texts.beside), 'file')} beside the texts: {names}"


def _ids(
    config: LanguageConfig, root: Path, files: TokenFiles, known: Tokenizer | None, store: Mapping[str, Any] | None
) -> LanguageData:
    folder = root if root.is_dir() else root.parent
    tokenizer = (
        known or _named_tokenizer(config.data.tokenizer, root) or nanogpt_tokenizer(folder) or _of_weights(config)
    )
    _refuse_ids_of_another(tokenizer, root)
    vocab = int((store or {}).get("vocab", 0)) or (tokenizer.num_tokens if tokenizer else config.model.vocab or 50257)
    train, val = (open_tokens(paths, vocab=vocab) for paths in (files.train, files.val))
    named = f"{tokenizer.name}, {vocab:,} tokens" if tokenizer else f"none: {vocab:,} ids without their text"
    return LanguageData(
        train=train,
        val=val,
        vocab=vocab,
        tokenizer=tokenizer,
        about=(("token ids", f"{format_count(len(files.train) + len(files.val), 'file')}, {_in_words(train, val)}"),
               ("tokenizer", named)),
        notes=() if files.val else (f"nothing is validated: {_why_no_validation(root)}",),
    )  # fmt: skip


def _why_no_validation(root: Path) -> str:
    return f"{root} has no .bin with `val` in its name" if root.is_dir() else f"{root.name} is named, not its folder"


def _refuse_ids_of_another(tokenizer: Tokenizer | None, root: Path) -> None:
    """Ids mean nothing but by their own tokenizer: with another one every score is of other words."""
    folder = root if root.is_dir() else root.parent
    beside = _named_tokenizer("auto", root) or nanogpt_tokenizer(folder)
    if tokenizer is not None and beside is not None and beside.stored() != tokenizer.stored():
        raise DataError(
            f"the ids in {folder} are of another tokenizer: {beside.name}, {beside.num_tokens:,} tokens",
            why=f"a file beside them says so; this model's is {tokenizer.name}, {tokenizer.num_tokens:,} tokens",
            fix="the text itself, or ids made with the model's tokenizer",
        )


def _named_tokenizer(wish: str, root: Path) -> Tokenizer | None:
    """What was asked for, or lies beside the data; None where the text itself has to say, or nobody does."""
    folder = root if root.is_dir() else root.parent
    if wish == "auto":
        return tokenizer_at(folder) if has_tokenizer(folder) else None
    if wish in CHARACTERS:
        return None
    if wish == "bytes":
        return Bytes()
    if wish.startswith(TIKTOKEN):
        return Tiktoken(wish.removeprefix(TIKTOKEN))
    return tokenizer_at(Path(wish))


def _of_weights(config: LanguageConfig) -> Tokenizer | None:
    """The one that lies beside the weights to start from: their rows are its tokens."""
    return _beside_weights(config) if config.data.tokenizer == "auto" else None


def _beside_weights(config: LanguageConfig) -> Tokenizer | None:
    if not config.model.weights:
        return None
    weights = Path(config.model.weights)
    folder = weights if weights.is_dir() else weights.parent
    return tokenizer_at(folder) if has_tokenizer(folder) else None


def is_of_weights(tokenizer: Tokenizer | None, config: LanguageConfig) -> bool:
    theirs = _beside_weights(config)
    return tokenizer is not None and theirs is not None and identity(theirs) == identity(tokenizer)


def _refuse_another_than_the_weights(tokenizer: Tokenizer, config: LanguageConfig) -> None:
    """As many tokens are not the same tokens."""
    theirs = _beside_weights(config)
    if theirs is not None and disagree(tokenizer, theirs):
        raise DataError(
            f"{config.model.weights} was trained with another tokenizer: {theirs.name}, {theirs.num_tokens:,} tokens",
            why=f"it lies beside them; this one, {tokenizer.name}, {tokenizer.num_tokens:,} tokens, numbers others",
            fix="leave out data.tokenizer: then theirs is used",
        )


def _of_texts(wish: str, texts: TextFiles) -> Tokenizer:
    return Characters.of(read_text(path) for path in texts.all) if wish in CHARACTERS else Bytes()


def _in_words(train: Tokens, val: Tokens) -> str:
    return f"{len(train):,} + {len(val):,} tokens"
