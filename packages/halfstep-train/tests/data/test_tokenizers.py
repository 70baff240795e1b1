"""Tokenizers give a text back as it was, know its bytes, and survive being stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import DataError
from halfstep_train.workloads.language.tokenizers import (
    Bpe,
    Bytes,
    Characters,
    Tiktoken,
    Tokenizer,
    identify,
    read_tokenizer,
    restore_tokenizer,
)

TEXT = "Äpfel and 汉字, twice: Äpfel and 汉字.\n  Spaces\tand 😀\n"


def small_bpe(folder: Path) -> Path:
    """A byte-level BPE as GPT-2's, trained on a few lines."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    trained.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def each(folder: Path) -> list[Tokenizer]:
    return [
        Bytes(),
        Characters.from_texts([TEXT]),
        Characters.from_texts([TEXT, "more"]),
        read_tokenizer(small_bpe(folder)),
    ]


def lengths_of(tokenizer: Tokenizer) -> Any:
    lengths = tokenizer.get_byte_lengths()
    assert lengths is not None
    assert len(lengths) == tokenizer.num_tokens
    return lengths


def num_bytes(tokenizer: Tokenizer) -> int:
    return int(lengths_of(tokenizer)[tokenizer.encode(TEXT)].sum())


def test_a_text_comes_back_and_its_tokens_have_its_bytes(tmp_path: Path) -> None:
    for tokenizer in each(tmp_path):
        ids = tokenizer.encode(TEXT)
        assert tokenizer.decode(ids.tolist()) == TEXT, tokenizer.name
        assert num_bytes(tokenizer) == len(TEXT.encode()), tokenizer.name
        assert ids.max() < tokenizer.num_tokens


def sentencepiece_like() -> Any:
    """Characters with a mark for a space, as Llama's and T5's are written: the mark in front of a text is not of it."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["<unk>", "</s>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", *sorted({*TEXT.replace(" ", "▁")} - {"😀"})]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: k for k, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Metaspace(), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def test_sentencepieces_tokens_have_the_texts_bytes_and_the_space_in_front_of_it() -> None:
    tokenizer = Bpe(sentencepiece_like().to_str())
    assert tokenizer.decode(tokenizer.encode(TEXT).tolist()) == TEXT
    assert num_bytes(tokenizer) == 1 + len(TEXT.encode())


def test_added_words_of_a_byte_level_tokenizer_have_their_bytes(tmp_path: Path) -> None:
    loaded = pytest.importorskip("tokenizers").Tokenizer.from_file(str(small_bpe(tmp_path)))
    loaded.add_tokens(["汉字"])
    assert num_bytes(Bpe(loaded.to_str())) == len(TEXT.encode())


def test_words_without_their_spaces_do_not_say_how_many_bytes_they_are() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "ByteLevel": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert Bpe(words.to_str()).get_byte_lengths() is None
    assert Bpe(words.to_str()).name == "WordLevel"


def test_a_text_is_never_cut_or_padded_as_a_file_says_that_served_another_purpose(tmp_path: Path) -> None:
    whole = read_tokenizer(small_bpe(tmp_path))
    loaded = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for setting in (lambda: loaded.enable_truncation(8), lambda: loaded.enable_padding(length=999)):
        setting()
        assert Bpe(loaded.to_str()).encode(TEXT).tolist() == whole.encode(TEXT).tolist()


def test_a_vocabulary_that_leaves_numbers_out_ends_with_its_largest(tmp_path: Path) -> None:
    content = json.loads(small_bpe(tmp_path).read_text(encoding="utf-8"))
    content["model"]["vocab"]["Ä"] = 1000
    tokenizer = Bpe(json.dumps(content))
    assert tokenizer.num_tokens == 1001
    assert num_bytes(tokenizer) == len(TEXT.encode())
    assert tokenizer.decode([500]) == ""


def test_a_stored_tokenizer_gives_the_same_numbers(tmp_path: Path) -> None:
    for tokenizer in each(tmp_path):
        again = restore_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
        assert identify(again) == identify(tokenizer)
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
        assert again.end == tokenizer.end


def test_the_end_of_a_document_is_no_text(tmp_path: Path) -> None:
    for tokenizer in each(tmp_path):
        if tokenizer.end is not None:
            assert tokenizer.decode([*tokenizer.encode("and").tolist(), tokenizer.end]) == "and"
            assert lengths_of(tokenizer)[tokenizer.end] == 0


def test_a_character_that_is_not_known_is_named_with_its_place() -> None:
    with pytest.raises(DataError, match=r"notes\.txt has the character 'z' at position 3") as error:
        Characters.from_texts(["abc"]).encode("abcz", source="notes.txt")
    assert "bytes" in error.value.fix


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match="no tokenizer at"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        read_tokenizer(tmp_path)


def test_tiktoken_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match="tiktoken") as error:
        Tiktoken("gpt2")
    assert "pip install tiktoken" in error.value.fix
