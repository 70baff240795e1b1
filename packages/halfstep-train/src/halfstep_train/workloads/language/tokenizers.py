"""Tokenizers: bytes, characters, BPE from a local file, and the encodings of tiktoken.

A run stores its tokenizer as plain values, so that the model can be used without its data.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.disk import parse_json
from halfstep.errors import DataError, suggest_install, suggest_nearest, summarise_error
from halfstep_train.data.files import Array, import_optional

END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "[SEP]")
"""Tokens that mark the end of a document."""
SPACE, ONE_BYTE = "\u2581", re.compile("<0x[0-9A-F]{2}>")
"""How SentencePiece writes a space, and a byte of an unknown character."""
TIKTOKEN = "tiktoken:"
OWN_FILE = "halfstep_tokenizer.json"
"""File next to exported weights if Hugging Face has no format for the tokenizer."""


class Bytes:
    """One token per UTF-8 byte, and one for the end of a document.

    The other tokenizers have the same attributes and methods; their `end` is None if no token ends a document.
    """

    name, num_tokens, end = "bytes", 257, 256

    def encode(self, text: str, *, source: str = "the text") -> Array:
        """Return ids from 0 to num_tokens - 1; an error names the `source` of the text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def get_byte_lengths(self) -> Array:
        """Return the number of UTF-8 bytes of each token (0 for the end of a document); Bpe returns None if unknown."""
        return np.array([1] * 256 + [0])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `restore_tokenizer` makes the tokenizer."""
        return {"kind": "bytes"}


class Characters:
    """One token per character of the training text, and one for the end of a document if there are several."""

    name = "characters"

    def __init__(self, alphabet: str, *, has_end: bool = False) -> None:
        self.alphabet = alphabet
        self.codes = np.frombuffer(alphabet.encode("utf-32-le"), dtype=np.uint32)
        assert np.all(self.codes[1:] > self.codes[:-1]), "sorted, each once"
        self.end = len(alphabet) if has_end else None
        self.num_tokens = len(alphabet) + has_end

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Characters:
        alphabets = [set(text) for text in texts]
        return cls("".join(sorted(set().union(*alphabets))), has_end=len(alphabets) > 1)

    def encode(self, text: str, *, source: str = "the text") -> Array:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = np.searchsorted(self.codes, codes)
        # searchsorted returns a position for unknown characters too.
        is_known = self.codes[np.minimum(ids, len(self.codes) - 1)] == codes
        if not is_known.all():
            at = int(np.argmin(is_known))
            raise DataError(
                f"{source} has the character {text[at]!r} at position {at:,}, which the tokenizer does not have",
                why=f"it has only the {len(self.alphabet)} characters of the text it was made from",
                fix="replace it, or train with data.tokenizer=bytes, which encodes any text",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[token] for token in ids if token < len(self.alphabet))

    def get_byte_lengths(self) -> Array:
        return np.array([len(character.encode()) for character in self.alphabet] + [0] * (self.end is not None))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "characters", "alphabet": self.alphabet, "has_end": self.end is not None}


class Bpe:
    """A tokenizer of Hugging Face's package `tokenizers`, from the text of a tokenizer.json: BPE or another model."""

    def __init__(self, text: str, *, source: str = "the run's tokenizer") -> None:
        tokenizers = import_optional("tokenizers", source, suggest_install("tokenizers"))
        try:
            self.loaded = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare exceptions
            raise DataError(
                f"cannot read the tokenizer {source}", why=summarise_error(error), fix="give a tokenizer.json"
            ) from error
        # The file may contain truncation and padding from its earlier use: a book would become its first 512 tokens.
        self.loaded.no_truncation()
        self.loaded.no_padding()
        self.text, self.name = text, type(self.loaded.model).__name__
        self.num_tokens = max(self.loaded.get_vocab().values(), default=-1) + 1  # some skip numbers
        ends = (self.loaded.token_to_id(name) for name in END_NAMES)
        self.end: int | None = next((end for end in ends if end is not None), None)

    def encode(self, text: str, *, source: str = "the text") -> Array:
        return np.array(self.loaded.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.loaded.decode(list(ids), skip_special_tokens=True))

    def get_byte_lengths(self) -> Array | None:
        """Return the number of UTF-8 bytes of each token, or None if unknown.

        Byte-level tokens have one character per byte. Tokens of SentencePiece are text with ▁ for a space, or one byte.
        Other models (WordPiece, words) drop spaces, so their lengths are unknown.
        """
        content = parse_json(self.text)
        around = str([content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
        is_byte_level = "ByteLevel" in around
        if not is_byte_level and SPACE not in around:
            return None
        lengths = np.zeros(self.num_tokens, dtype=np.int64)
        for text, token in self.loaded.get_vocab().items():
            num_bytes = 1 if ONE_BYTE.fullmatch(text) else len(text.replace(SPACE, " ").encode())
            lengths[token] = len(text) if is_byte_level else num_bytes
        # Special tokens stand for no text.
        for token, added in self.loaded.get_added_tokens_decoder().items():
            lengths[token] = 0 if added.special else len(added.content.encode())
        return lengths

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bpe", "json": self.text}


class Tiktoken:
    """An encoding of OpenAI's package tiktoken, which downloads it or finds it in its cache."""

    def __init__(self, encoding: str) -> None:
        fix = "pip install tiktoken, or data.tokenizer=FOLDER/tokenizer.json"
        tiktoken = import_optional("tiktoken", f"data.tokenizer={TIKTOKEN}{encoding}", fix)
        try:
            self.loaded = tiktoken.get_encoding(encoding)
        except ValueError as error:
            raise DataError(
                f"tiktoken has no encoding {encoding!r}", fix=suggest_nearest(encoding, tiktoken.list_encoding_names())
            ) from error
        except Exception as error:  # no network, a damaged file
            raise DataError(
                f"tiktoken cannot load its encoding {encoding!r}",
                why=f"{type(error).__name__}; tiktoken downloads files that are not in its cache",
                fix="set TIKTOKEN_CACHE_DIR to a folder with its files, or data.tokenizer=FOLDER/tokenizer.json",
            ) from error
        self.encoding, self.name = encoding, f"{TIKTOKEN}{encoding}"
        self.num_tokens, self.end = int(self.loaded.n_vocab), int(self.loaded.eot_token)

    def encode(self, text: str, *, source: str = "the text") -> Array:
        return np.array(self.loaded.encode_ordinary(text), dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.loaded.decode([token for token in ids if token != self.end]))

    def get_byte_lengths(self) -> Array:
        lengths = np.zeros(self.num_tokens, dtype=np.int64)
        for token in range(self.num_tokens):
            if token != self.end:
                with contextlib.suppress(KeyError):  # some encodings skip numbers
                    lengths[token] = len(self.loaded.decode_single_token_bytes(token))
        return lengths

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "tiktoken", "encoding": self.encoding}


Tokenizer = Bytes | Characters | Bpe | Tiktoken


def restore_tokenizer(stored: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that `to_dict` described."""
    kind = stored["kind"]
    if kind == "characters":
        return Characters(stored["alphabet"], has_end=stored["has_end"])
    if kind == "bpe":
        return Bpe(stored["json"])
    if kind == "tiktoken":
        return Tiktoken(stored["encoding"])
    return Bytes()


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer to a folder, from which `read_tokenizer` reads it."""
    if isinstance(tokenizer, Bpe):
        (folder / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    else:
        (folder / OWN_FILE).write_text(identify(tokenizer), encoding="utf-8")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, a folder with it, or an exported tokenizer of a run."""
    if (path / OWN_FILE).is_file():
        return restore_tokenizer(parse_json((path / OWN_FILE).read_text(encoding="utf-8")))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"no tokenizer at {path}",
            why="there is no tokenizer.json",
            fix="set data.tokenizer to bytes, characters, a tokenizer.json or its folder, or tiktoken:gpt2",
        )
    try:
        return Bpe(file.read_text(encoding="utf-8"), source=str(file))
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the tokenizer {file}", why="it is not UTF-8") from error


def has_tokenizer(folder: Path) -> bool:
    """True if a folder holds the file of a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", OWN_FILE))


def have_different_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """True if two tokenizers assign different ids. For different kinds (tiktoken and a file) this is unknown: False."""
    if isinstance(one, Bpe) and isinstance(other, Bpe):
        return bool(one.loaded.get_vocab() != other.loaded.get_vocab())
    return type(one) is type(other) and identify(one) != identify(other)


def identify(tokenizer: Tokenizer) -> str:
    """Return a string that identifies a tokenizer: its plain values as JSON."""
    return json.dumps(tokenizer.to_dict(), sort_keys=True)
