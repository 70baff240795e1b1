"""Windows of tokens, files of ids of other projects, and texts tokenised once."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads.language.data import (
    TextFiles,
    Tokens,
    TokenSamples,
    choose_cache_path,
    find_texts,
    find_token_files,
    open_ids,
    open_or_tokenise,
    open_tokens,
    read_nanogpt_tokenizer,
)
from halfstep_train.workloads.language.tokenizers import Bytes, Characters


def counting(num: int) -> Tokens:
    return Tokens([np.arange(num, dtype=np.uint16)])


def windows(samples: TokenSamples, epoch: int = 0) -> list[list[int]]:
    return [samples.sample(i, key=(0, epoch, i))["tokens"].tolist() for i in range(len(samples))]


def texts_at(root: Path, val_fraction: float = 0.1) -> TextFiles:
    return find_texts(root, val_fraction=val_fraction, bad_files=BadFiles("error"))


# --- windows ---


def test_validation_predicts_every_token_but_the_first_exactly_once() -> None:
    samples = TokenSamples(counting(23), context=5, vocab=23, is_training=False)
    targets = torch.cat([samples.sample(i, key=(0, 0, i))["targets"] for i in range(len(samples))])
    assert targets[targets >= 0].tolist() == list(range(1, 23))
    assert len(samples) == 5
    assert (targets < 0).sum() == 3


@pytest.mark.parametrize("num", [6, 7, 10, 11, 24, 25, 100])
def test_a_training_epoch_goes_once_over_the_tokens_from_a_place_of_its_own(num: int) -> None:
    samples = TokenSamples(counting(num), context=5, vocab=num, is_training=True)
    assert len(samples) >= 1
    starts = set()
    for epoch in range(20):
        seen = [token for window in windows(samples, epoch) for token in window]
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        assert seen[-1] + 1 < num, "each token has its next one"
        starts.add(seen[0])
    assert len(starts) > 1 or num in (6, 11)


def test_targets_are_the_next_tokens() -> None:
    sample = TokenSamples(counting(50), context=5, vocab=50, is_training=True).sample(3, key=(7, 2, 3))
    assert torch.equal(sample["tokens"] + 1, sample["targets"])


def test_a_batch_is_its_samples_and_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    samples = TokenSamples(counting(500), context=5, vocab=500, is_training=True)
    batch = samples.make_batch(torch.tensor([4, 0, 9]), seed=3, epoch=2)
    for row, index in enumerate((4, 0, 9)):
        alone = samples.sample(index, key=(3, 2, index))
        assert torch.equal(batch["tokens"][row], alone["tokens"])
        assert torch.equal(batch["targets"][row], alone["targets"])


def test_windows_span_shards() -> None:
    shards = Tokens([np.arange(4), np.empty(0, dtype=np.int64), np.arange(4, 5), np.arange(5, 40)])
    assert len(shards) == 40
    samples = TokenSamples(shards, context=8, vocab=40, is_training=False)
    assert windows(samples)[0] == list(range(8))


def test_an_id_past_the_vocabulary_is_named_when_it_is_read() -> None:
    samples = TokenSamples(counting(40), context=8, vocab=30, is_training=False)
    with pytest.raises(DataError, match=r"token 30 at position 30, past the vocabulary of 30"):
        windows(samples)


# --- files of other projects ---


def shard(path: Path, ids: list[int], *, magic: int = 20240520, version: int = 1, count: int | None = None) -> Path:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype=np.uint16).tobytes())
    return path


def test_nanogpts_two_files_and_its_characters_are_read(tmp_path: Path) -> None:
    for name, num in (("train", 900), ("val", 100)):
        np.arange(num, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}))
    files = find_token_files(tmp_path)
    assert files is not None
    assert len(open_tokens(files[0], vocab=1000)) == 900
    assert open_tokens(files[1], vocab=1000).read(98, 2).tolist() == [98, 99]
    found = read_nanogpt_tokenizer(tmp_path)
    assert isinstance(found, Characters)
    assert found.alphabet == "ab"


def test_characters_of_meta_pkl_must_differ(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a", 1: "a"}, "vocab_size": 2}))
    with pytest.raises(DataError, match="does not list single characters in order"):
        read_nanogpt_tokenizer(tmp_path)


def test_a_pickle_with_an_object_in_it_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Path("x")}))
    with pytest.raises(DataError, match="cannot read") as error:
        read_nanogpt_tokenizer(tmp_path)
    assert "object" in error.value.why


def test_llmcs_shards_are_read_in_order_without_their_header(tmp_path: Path) -> None:
    shard(tmp_path / "fineweb_train_000010.bin", [5, 6])
    shard(tmp_path / "fineweb_train_000002.bin", [1, 2, 3, 4])
    shard(tmp_path / "fineweb_val_000000.bin", [9])
    files = find_token_files(tmp_path)
    assert files is not None
    assert open_tokens(files[0], vocab=10).read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert open_tokens(files[1], vocab=10).read(0, 1).tolist() == [9]


def test_files_of_the_wrong_kind_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.arange(500, dtype=np.uint32).tofile(tmp_path / "wide.bin")
    (tmp_path / "text.bin").write_text("Größer als ein Byte.\n" * 20)
    shard(tmp_path / "short.bin", [1, 2, 3], count=9)
    shard(tmp_path / "newer.bin", [1, 2, 3], version=2)
    for name, word in (("empty", "empty"), ("odd", "odd number"), ("wide", "32-bit"), ("text", "contain text: 'Größer"),
                       ("short", "header claims 9"),
                       ("newer", "version 2")):  # fmt: skip
        with pytest.raises(DataError, match=word):
            open_ids(tmp_path / f"{name}.bin")
    np.array([1, 2, 60000], dtype=np.uint16).tofile(tmp_path / "other.bin")
    with pytest.raises(DataError, match="token 60,000 at position 2, past the vocabulary of 50,257"):
        open_tokens((tmp_path / "other.bin",), vocab=50257)
    with pytest.raises(DataError, match="no training file"):
        find_token_files(tmp_path)


def test_a_bin_of_another_kind_beside_texts_is_none_of_ids(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a text")
    (tmp_path / "sentencepiece.bin").write_bytes(b"model")
    assert find_token_files(tmp_path) is None
    (tmp_path / "val.bin").write_bytes(b"ids")
    with pytest.raises(DataError, match="no training file"):
        find_token_files(tmp_path)


# --- texts ---


def test_the_end_of_a_single_text_is_its_validation_part(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("abcdefghij")
    texts = texts_at(tmp_path)
    assert [text for _, text in texts.iterate_documents("train")] == ["abcdefghi"]
    assert [text for _, text in texts.iterate_documents("val")] == ["j"]


def test_of_several_texts_whole_ones_are_for_validation(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 20)
    texts = texts_at(tmp_path)
    assert [path.name for path in texts.train] == [f"{number}.txt" for number in range(10)]
    assert [path.name for path in texts.val] == ["10.txt", "11.txt"]
    assert "19% of the bytes" in texts.source


def test_parts_that_have_names_are_kept(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("one")
    (tmp_path / "valid.txt").write_text("two")
    texts = texts_at(tmp_path)
    assert [path.name for path in texts.all] == ["train.txt", "valid.txt"]
    assert texts.source == "valid.txt"


def test_parts_are_known_by_a_word_of_their_names_where_both_are_there(tmp_path: Path) -> None:
    for name in ("ptb.test.txt", "ptb.train.txt", "ptb.valid.txt"):
        (tmp_path / name).write_text(name)
    texts = texts_at(tmp_path)
    assert [path.name for path in texts.all] == ["ptb.train.txt", "ptb.valid.txt"]
    assert texts.unread == (tmp_path / "ptb.test.txt",)
    (tmp_path / "ptb.test.txt").unlink()
    (tmp_path / "ptb.valid.txt").rename(tmp_path / "a book.txt")
    assert [path.name for path in texts_at(tmp_path).train] == ["a book.txt"]


@pytest.mark.parametrize("name", ["train.txt", "train/a.txt"])
def test_what_lies_beside_a_training_part_is_no_text_of_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a text to learn from " * 50)
    (tmp_path / "README.md").write_text("about it")
    found = texts_at(tmp_path)
    assert found.train == (tmp_path / name,)
    assert (found.val, found.cut) == ((), 0.1)
    assert found.unread == (tmp_path / "README.md",), "which a note names"


def test_the_rest_is_trained_on_where_only_the_validation_part_has_a_name(tmp_path: Path) -> None:
    for name in ("book.txt", "val.txt", "more.txt"):
        (tmp_path / name).write_text(name * 9)
    found = texts_at(tmp_path)
    assert [path.name for path in found.train] == ["book.txt", "more.txt"]
    assert [path.name for path in found.val] == ["val.txt"]
    (tmp_path / "book.txt").unlink()
    (tmp_path / "more.txt").unlink()
    assert texts_at(tmp_path).train == (tmp_path / "val.txt",)  # alone it is the text


def test_ids_in_a_folder_below_are_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/train.bin").write_bytes(b"ids")
    with pytest.raises(DataError, match="no text in") as error:
        texts_at(tmp_path)
    assert f"--data-dir {tmp_path / 'shards'}" in error.value.fix


@pytest.mark.parametrize("encoding", ["utf-16", "latin1"])
def test_the_fix_names_the_likely_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("caf\xe9", encoding=encoding)
    with pytest.raises(DataError, match="not UTF-8") as error:
        texts_at(tmp_path / "a.txt")
    assert f"iconv -f {encoding} " in error.value.fix


def test_utf16_without_its_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("it would be read as every other character 0", encoding="utf-16le")
    with pytest.raises(DataError, match="not UTF-8 text") as error:
        texts_at(tmp_path / "a.txt")
    assert "utf-16le" in error.value.fix


def test_texts_that_are_none_are_refused_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good " * 9)
    (tmp_path / "b.txt").write_text("good " * 9)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8: byte 0xe9 at position 3"):
        texts_at(tmp_path)
    skipping = BadFiles("skip")
    assert len(find_texts(tmp_path, val_fraction=0.1, bad_files=skipping).all) == 2
    assert "latin.txt" in skipping.skipped[0].what
    (tmp_path / "latin.txt").write_bytes(b" \n")
    with pytest.raises(DataError, match=r"latin\.txt is empty"):
        texts_at(tmp_path)
    (tmp_path / "pictures").mkdir()
    with pytest.raises(DataError, match="no text in"):
        texts_at(tmp_path / "pictures")


def test_code_beside_texts_is_not_read_and_a_folder_of_code_is(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("print('made by this')")
    (tmp_path / "more.py").write_text("pass")
    assert {path.suffix for path in texts_at(tmp_path).all} == {".py"}
    (tmp_path / "a.txt").write_text("a text")
    texts = texts_at(tmp_path)
    assert [path.name for path in texts.all] == ["a.txt"]
    assert [path.name for path in texts.unread] == ["more.py", "prepare.py"]


def test_documents_are_parted_by_their_end_and_a_text_is_tokenised_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    texts, place = texts_at(tmp_path), tmp_path / "cache.tokens"
    train, val = open_or_tokenise(texts, Bytes(), place)
    assert train.read(0, len(train)).tolist() == [97] * 3 + [256] + [98] * 3 + [256]
    assert val.read(0, len(val)).tolist() == [99] * 3 + [256]
    written = place.stat().st_mtime_ns
    open_or_tokenise(texts, Bytes(), place)
    assert place.stat().st_mtime_ns == written
    (tmp_path / "a.txt").write_text("xy")
    train, _ = open_or_tokenise(texts_at(tmp_path), Bytes(), place)
    assert train.read(0, 2).tolist() == [120, 121], "other texts are tokenised again"
    characters = Characters.from_texts(["abcxy"])
    assert choose_cache_path(tmp_path, characters) != choose_cache_path(tmp_path, Bytes())


def test_a_long_text_is_the_same_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number}\n\n word word\nx" for number in range(200))
    (tmp_path / "long.txt").write_text(text)
    monkeypatch.setattr("halfstep_train.workloads.language.data.TOKENISED_AT_ONCE", 40)
    monkeypatch.setattr("halfstep_train.data.cache_file.BLOCK_BYTES", 512)
    train, val = open_or_tokenise(texts_at(tmp_path), Bytes(), tmp_path / "cache")
    assert bytes([*train.read(0, len(train)), *val.read(0, len(val))]).decode() == text
