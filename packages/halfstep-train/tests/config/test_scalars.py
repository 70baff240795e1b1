"""Plain text to typed values."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep_train.config import section
from halfstep_train.config.schema import DataConfig
from halfstep_train.config.section import Plain, convert_for_field, parse_scalar
from halfstep_train.config.yaml_source import MAX_BYTES, parse_flow, parse_yaml, read_yaml
from halfstep_train.workloads import load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-7", -7),
        ("1_000", 1000),
        ("010", 10),
        ("yes", True),
        ("Off", False),
        ("no", False),
        ("null", None),
        ("None", None),
        ("~", None),
        ("", None),
    ],
)
def test_a_number_is_what_a_person_calls_a_number(text: str, value: object) -> None:
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)


@pytest.mark.parametrize(
    "text", ["1:30", "12:30:45", "2024-01-01", "e5", ".", "-", "1e", "0x10", "v1", "1.2.3", "bf16"]
)
def test_yaml_1_1_surprises_stay_text(text: str) -> None:
    assert parse_scalar(text) == text


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none())
def test_what_python_prints_reads_back(value: object) -> None:
    assert parse_scalar(str(value)) == value


def test_plain_text_is_settled_by_its_field_and_quoted_text_is_left_alone() -> None:
    assert convert_for_field(Plain("off"), Literal["auto", "off"]) == "off"
    assert convert_for_field(Plain("off"), bool) is False
    for word in ("false", "False", "no", "off", "null"):
        assert convert_for_field(Plain(word), Literal["auto", "off"]) == "off"
    assert convert_for_field(Plain("false"), Literal["auto", "none"]) == "false", "no word of its own for it"
    assert convert_for_field([Plain("001"), "002"], tuple[str, ...]) == ["001", "002"]
    assert convert_for_field({"a": Plain("1e-3"), "b": "1e-3"}, dict[str, float | str]) == {"a": 1e-3, "b": "1e-3"}
    assert convert_for_field(Plain("null"), str | None) is None


# --- YAML without its traps ---


def test_scalars_keep_their_text_and_every_key_its_line() -> None:
    document = parse_yaml("train:\n  epochs: 3\n\n  lr: 1e-5\nname: 'no'\n", "a.yaml")
    assert document.values == {"train": {"epochs": "3", "lr": "1e-5"}, "name": "no"}
    assert isinstance(document.values["train"]["lr"], Plain)  # type: ignore[index]
    assert not isinstance(document.values["name"], Plain)
    assert document.lines == {("train",): 1, ("train", "epochs"): 2, ("train", "lr"): 4, ("name",): 5}


def test_an_empty_file_says_nothing() -> None:
    assert parse_yaml("# only a comment\n", "a.yaml").values == {}


def test_a_duplicate_key_is_refused_with_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: train\.lr is set twice, on lines 2 and 4"):
        parse_yaml("train:\n  lr: 1\n  epochs: 2\n  lr: 1\n", "a.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2\nb: 3\n", "line 2, column"),
        ("a: b: c\n", "line 1, column 5"),
        ("a:\n\t- 1\n", "line 2, column 1"),
        ("a: 'open\n", "bad YAML at line"),
        ("a: *nowhere\n", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a: \x00\n", "bad YAML"),
        ("- 1\n- 2\n", "found a list"),
        ("just words\n", "found the text 'just words'"),
        ("long " * 99, "found the text 'long long long long long long long long long long long [...]'"),
        ("a: !!python/object/apply:os.system ['true']\n", r"a.yaml:1: the tag !!python/object/apply:os.system"),
        ("a: !secret 1\n", "a.yaml:1: the tag !secret"),
        ("? [1, 2]\n: 3\n", "a.yaml:1: a key must be text"),
        ("a: &a\n  b: *a\n", "nested too deeply"),
        ("a: &a [1]\nb:\n  <<: *a\n", "merges mappings"),
    ],
)
def test_broken_yaml_is_an_error_that_says_where(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "a.yaml")
    assert says in str(caught.value)
    assert "a.yaml" in str(caught.value)


def test_deep_nesting_and_alias_bombs_are_bounded() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    merges = "a0: &a0 {k: 1}\n" + "".join(
        f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    for text in (bomb, merges, "a: " + "[" * 60 + "]" * 60, "[" * 100_000):
        with pytest.raises(ConfigError, match="too large|too deeply"):
            parse_yaml(text, "a.yaml")


def test_anchors_and_merges_work_and_own_keys_win() -> None:
    text = "base: &base {lr: 1, wd: 2}\nother: &other {lr: 9, eps: 3}\ntrain:\n  lr: 5\n  <<: [*base, *other]\n"
    document = parse_yaml(text, "a.yaml")
    assert document.values["train"] == {"lr": "5", "wd": "2", "eps": "3"}
    assert document.lines[("train", "lr")] == 4


def test_flow_values_of_overrides() -> None:
    assert parse_flow("[a, 1e-3]", "x") == ["a", "1e-3"]
    assert parse_flow("'16'", "x") == "16"
    assert parse_flow("{a: {b: 1}}", "x") == {"a": {"b": "1"}}


def test_a_missing_space_behind_a_colon_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'vae:fp12' has no space after its colon\n  fix: \{vae: fp12\}"):
        parse_flow("{vae:fp12}", "x")
    assert parse_flow('{"a:b": 1, c: }', "x") == {"a:b": "1", "c": ""}


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfworkload: unet\r\n")
    assert read_yaml(path).values == {"workload": "unet"}


def test_files_that_cannot_be_configs(tmp_path: Path) -> None:
    latin, huge = tmp_path / "latin.yaml", tmp_path / "huge.yaml"
    latin.write_bytes("a: 1\nb: caf\xe9\n".encode("latin-1"))
    huge.write_bytes(b"#" * (MAX_BYTES + 1))
    cases = [
        (tmp_path / "none.yaml", "no such config file"),
        (tmp_path, "is a folder"),
        (latin, r"latin\.yaml:2: byte 0xe9 is not UTF-8"),
        (huge, "1,048,577 bytes"),
    ]
    for path, says in cases:
        with pytest.raises(ConfigError, match=says):
            read_yaml(path)


# --- the default number of workers ---


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (6, 6), (64, 8)])
def test_auto_is_one_worker_a_core_and_at_most_eight(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(section, "count_cores", lambda: cores)
    assert DataConfig().num_workers == expected
    assert DataConfig(num_workers="auto").num_workers == expected


def test_off_and_numbers_and_nonsense() -> None:
    assert load("unet", overrides=["data.num_workers=null"]).config.data.num_workers == 0
    num_workers = load("unet", overrides=["data.num_workers=auto"]).config.data.num_workers
    assert num_workers == min(section.count_cores(), section.MOST)
    with pytest.raises(ConfigError, match="data.num_workers = 'many'"):
        load("unet", overrides=["data.num_workers=many"])
