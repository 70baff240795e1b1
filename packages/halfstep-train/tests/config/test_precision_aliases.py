"""Every spelling of a precision, alone and together with the keys it comes with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from halfstep.errors import ConfigError
from halfstep.precision.names import PRECISION_NAMES, PRECISIONS, normalise_precision
from halfstep_train.config.aliases import FOREIGN_KEYS, KEY_ALIASES
from halfstep_train.config.statements import list_fields
from halfstep_train.workloads import KINDS, from_dict, load

TABLE = """
fp32: fp32 float32 float single full 32 32-true 32-bit amp_fp32 highest no none None null ~ off false False FP32
fp32: torch.float32
tf32: tf32 TF32 tensorfloat32 tf32-mixed high
bf16: bf16 BF16 bfloat16 bf16-mixed bfloat16-mixed mixed_bfloat16 mixed_bf16 amp_bf16 bfloat torch.bfloat16
fp16: fp16 float16 half 16 16-mixed 16-bit fp16-mixed float16-mixed mixed_float16 mixed_fp16 amp_fp16 torch.float16
fp8: fp8 float8 8 fp8-mixed amp_fp8 e4m3 fp8_e4m3 float8_e4m3 float8_e4m3fn hybrid transformer-engine
bf16-true: bf16-true bfloat16-true pure_bf16 true_bf16
auto: auto
"""
ROWS = [(word, line.split(":")[0]) for line in TABLE.strip().splitlines() for word in line.split()[1:]]


@pytest.mark.parametrize(("spelling", "meaning"), ROWS)
def test_every_spelling_has_one_meaning_in_python_in_yaml_and_as_an_override(
    spelling: str, meaning: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"workload: unet\nprecision: {spelling}\n")
    assert normalise_precision(spelling) == meaning
    assert load(str(path)).config.precision.default == meaning
    assert load("unet", overrides=[f"trainer.precision={spelling}"]).config.precision.default == meaning


def test_the_rows_cover_the_whole_table() -> None:
    assert set(PRECISION_NAMES) <= {spelling for spelling, _ in ROWS}
    assert set(PRECISION_NAMES.values()) == set(PRECISIONS)


@pytest.mark.parametrize(
    ("value", "meaning"), [(16, "fp16"), (32, "fp32"), (False, "fp32"), (None, "fp32"), (8, "fp8")]
)
def test_python_values_that_are_not_text(value: object, meaning: str) -> None:
    assert normalise_precision(value) == meaning


@pytest.mark.parametrize("word", ["fp16-true", "16-true", "half-true", "pure_fp16", "64", "double", "fp64", "e5m2"])
def test_precisions_not_offered_are_refused_with_the_reason(word: str) -> None:
    with pytest.raises(ConfigError, match="is not supported") as caught:
        normalise_precision(word, "here")
    assert caught.value.why
    assert caught.value.fix.startswith("use ")


@pytest.mark.parametrize("word", ["fp7", "", "true", "bf17-mixed", "yes", "1", "17"])
def test_unknown_precisions_are_refused_with_a_suggestion(word: str) -> None:
    with pytest.raises(ConfigError, match="unknown precision") as caught:
        normalise_precision(word)
    assert "bf16" in caught.value.fix or "did you mean" in caught.value.fix


JOINT = [
    # Guide 0
    ({"use_amp": True, "amp_dtype": "bfloat16"}, "bf16"),
    ({"use_amp": True, "amp_dtype": "float16"}, "fp16"),
    ({"use_amp": False, "amp_dtype": "bfloat16"}, "fp32"),
    ({"use_amp": False}, "fp32"),
    ({"amp_dtype": "bfloat16"}, "bf16"),
    # Guide 1
    ({"mixed_precision": True, "precision_type": "fp16"}, "fp16"),
    ({"mixed_precision": True}, "bf16"),
    ({"mixed_precision": False, "precision_type": "fp16"}, "fp32"),
    # Guide 3
    ({"bf16": True, "use_optimizations": True}, "bf16"),
    ({"use_optimizations": True}, "auto"),
    ({"use_amp": False, "use_optimizations": True}, "tf32"),
    # Guide 4, and Accelerate's file
    ({"trainer": {"amp": True, "fp16": False}}, "bf16"),
    ({"trainer": {"amp": True, "fp16": True}}, "fp16"),
    ({"trainer": {"amp": False, "fp16": False}}, "fp32"),
    ({"trainer": {"fp16": True}}, "fp16"),
    ({"trainer": {"fp16": False}}, "fp32"),
    ({"mixed_precision": "bf16"}, "bf16"),
    ({"mixed_precision": "no"}, "fp32"),
    # Statements that agree
    ({"precision": "bf16", "trainer": {"precision": "bf16-mixed"}}, "bf16"),
    ({"precision": "fp16", "use_amp": True}, "fp16"),
    ({"precision": "tf32", "use_amp": False}, "tf32"),
    ({"fp16": False, "bf16": True}, "bf16"),
    ({"amp": True, "bf16": False}, "fp16"),
    ({"use_amp": "true", "amp_dtype": "half"}, "fp16"),
]


@pytest.mark.parametrize(("keys", "meaning"), JOINT)
def test_keys_that_belong_together_are_one_statement(keys: Mapping[str, object], meaning: str) -> None:
    assert from_dict("unet", keys).config.precision.default == meaning


@pytest.mark.parametrize(
    "keys",
    [
        {"precision": "bf16", "use_amp": False},
        {"precision": "fp16", "trainer": {"precision": "bf16-mixed"}},
        {"fp16": True, "bf16": True},
        {"amp": False, "fp16": True},
        {"use_amp": True, "mixed_precision": False},
        {"use_amp": True, "amp_dtype": "float32"},
        {"precision": "fp16", "fp16": False},
        {"amp": True, "fp16": False, "bf16": False},
        {"amp_dtype": "float16", "fp16": False},
        {"precision": "fp32", "use_optimizations": True},
        {"mixed_precision": "bf16", "precision_type": "fp16"},
    ],
)
def test_statements_of_one_layer_that_disagree_are_an_error_naming_both(keys: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"`.*` \(config dict\) and `.*` \(config dict\) disagree"):
        from_dict("unet", keys)


def test_a_type_alone_is_that_precision_and_says_that_other_scripts_ignore_it() -> None:
    loaded = load("unet", flags={"precision_type": "bf16"})
    assert loaded.config.precision.default == "bf16"
    (warning,) = loaded.warnings
    assert "`--precision-type bf16` is read as precision=bf16" in warning
    assert "fp32" in warning
    assert load("unet", flags={"precision_type": "bf16", "mixed_precision": True}).warnings == ()


@pytest.mark.parametrize("off", ["precision: fp32", "use_amp: false", "precision: tf32", "preset: stable"])
def test_a_type_alone_switches_nothing_on_that_a_lower_layer_switched_off(tmp_path: Path, off: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"workload: unet\n{off}\n")
    without = load(str(path)).config.precision.default
    loaded = load(str(path), flags={"precision_type": "bf16"})
    assert loaded.config.precision.default == without
    (warning,) = loaded.warnings
    assert "`--precision-type bf16` has no effect" in warning
    assert "precision=bf16" in warning
    assert load(str(path), flags={"precision_type": "bf16", "mixed_precision": True}).config.precision.default == "bf16"


def test_a_type_changes_what_a_lower_layer_switched_on(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("workload: unet\nuse_amp: true\namp_dtype: bfloat16\n")
    loaded = load(str(path), overrides=["amp_dtype=float16"])
    assert loaded.config.precision.default == "fp16"
    assert loaded.warnings == ()


def test_a_switch_takes_the_type_a_lower_layer_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("workload: unet\nuse_amp: false\namp_dtype: float16\n")
    assert load(str(path)).config.precision.default == "fp32"
    assert load(str(path), overrides=["use_amp=true"]).config.precision.default == "fp16"


def test_a_higher_layer_wins_over_a_whole_lower_statement_and_the_record_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("workload: unet\ntrainer:\n  amp: True\n  fp16: False\n")
    loaded = load(str(path), flags={"fp16": True})
    assert loaded.config.precision.default == "fp16"
    assert str(loaded.overridden[0]) == (f"precision.default = fp16 (--fp16) overrides bf16 ({path}:3 {path}:4)")


def test_optimizations_lift_strict_fp32_of_a_lower_layer_to_tf32_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for written, meaning in (("32", "tf32"), ("bf16-mixed", "bf16")):
        path.write_text(f"workload: unet\ntrainer:\n  precision: {written}\n")
        assert load(str(path), flags={"use_optimizations": True}).config.precision.default == meaning


@pytest.mark.parametrize("key", ["use_amp", "trainer.amp", "bf16"])
def test_a_switch_that_is_not_true_or_false_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match="expected true or false"):
        load("unet", overrides=[f"{key}=maybe"])


def test_every_foreign_key_leads_to_a_setting_that_exists_and_hides_none() -> None:
    fields = {field for name in KINDS for field in list_fields(KINDS[name].get_schema(name))}
    assert set(KEY_ALIASES.values()) <= fields
    assert not set(KEY_ALIASES) & fields
    assert sum(len(keys) for keys in FOREIGN_KEYS.values()) == len(
        {key for keys in FOREIGN_KEYS.values() for key in keys}
    )


@pytest.mark.parametrize(("written", "meant"), [(-1, 0), (7, 7)])
def test_a_number_of_steps_below_zero_is_no_limit_in_other_trainers(written: int, meant: int) -> None:
    assert from_dict("unet", {"trainer.max_steps": written}).config.train.max_steps == meant
    assert load("unet", overrides=[f"max_steps={written}"]).config.train.max_steps == meant


def test_guide_0s_dict_is_understood_as_written() -> None:
    config = from_dict(
        "unet",
        {
            "batch_size": 16,
            "num_epochs": 50,
            "learning_rate": 1.5e-3,
            "early_stopping_patience": 20,
            "use_amp": True,
            "amp_dtype": "bfloat16",
            "compile_model": True,
            "data_dir": "somewhere",
            "num_workers": 4,
        },
    ).config
    assert (config.train.batch_size, config.train.epochs, config.optimizer.lr) == (16, 50, 1.5e-3)
    assert (config.train.fast, config.train.early_stopping_patience) == ("compile", 20)
    assert (config.precision.default, config.data.dir, config.data.num_workers) == ("bf16", "somewhere", 4)
    assert from_dict("unet", {"compile_model": False}).config.train.fast == "off"


def test_module_precisions_are_canonical_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        'workload: unet\nprecision:\n  default: bf16-mixed\n  modules: {"vae.*": no, head: 32, "a.b": half}\n'
    )
    assert load(str(path)).config.precision.modules == {"vae.*": "fp32", "head": "fp32", "a.b": "fp16"}
