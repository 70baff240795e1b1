"""Layers, provenance, references, presets, and what is said about a mistake."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from halfstep.errors import ConfigError
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig
from halfstep_train.config.statements import DEFAULT, list_fields
from halfstep_train.workloads import KINDS, from_dict, load
from halfstep_train.workloads.segmentation.config import UNetConfig

SCHEMAS = [KINDS[name].get_schema(name) for name in KINDS]


def load_text(tmp_path: Path, text: str, overrides: Sequence[str] = (), **flags: object) -> Loaded:
    path = tmp_path / "a.yaml"
    path.write_text("workload: unet\n" + text)
    return load(str(path), overrides=overrides, flags=flags)


DESIGN_EXAMPLE = """
precision: auto
preset: fast
data: {dir: data/carvana, image_size: 512, num_workers: 4}
model: {base_channels: 64}
optimizer: {name: adamw, lr: 1e-3}
schedule: {name: cosine, warmup_steps: 500}
train: {epochs: 100, batch_size: 8, accumulate: 1, clip_norm: 1.0, early_stopping_patience: 20, fast: auto,
  memory: normal, seed: 0}
guard: {on_fault: stop, max_consecutive: 5, margin: 50, max_rollbacks: 3}
globals: {BATCH_SIZE_PER_GPU: 8}
"""


def test_flag_over_override_over_file_over_preset_over_default(tmp_path: Path) -> None:
    text = "preset: fast\ntrain: {epochs: 40}\n"
    from_preset = load_text(tmp_path, "preset: fast\n")
    from_file = load_text(tmp_path, text)
    from_override = load_text(tmp_path, text, ["train.epochs=30"])
    from_flag = load_text(tmp_path, text, ["train.epochs=30"], epochs=20)
    found = [
        (each.config.train.epochs, each.origins["train.epochs"])
        for each in (from_preset, from_file, from_override, from_flag)
    ]
    assert [epochs for epochs, _ in found] == [50, 40, 30, 20]
    assert [source.layer for _, source in found] == ["preset", "file", "override", "flag"]
    assert [source.where for _, source in found] == [
        "preset fast",
        f"{tmp_path}/a.yaml:3",
        "train.epochs=30",
        "--epochs 20",
    ]
    assert load("unet", flags={"data_dir": "data"}).origins["train.epochs"] is DEFAULT


@pytest.mark.parametrize("text", ["", "data:\n", "data: {dir: null}\n"])
def test_without_a_data_folder_the_demos_settings_stand_below_everything_that_was_said(
    text: str, tmp_path: Path
) -> None:
    loaded = load_text(tmp_path, text, ["train.epochs=3"])
    assert loaded.config.data.image_size == UNetConfig.demo["data.image_size"]
    assert loaded.origins["data.image_size"].where == "demo data"
    assert (loaded.config.train.epochs, loaded.overridden) == (3, ())


def test_each_value_that_was_overridden_is_recorded_once_a_layer(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "preset: fast\ntrain: {epochs: 40}\n", ["num_epochs=30"])
    assert [str(override) for override in loaded.overridden] == [
        f"train.epochs = 40 ({tmp_path}/a.yaml:3) overrides 50 (preset fast)",
        f"train.epochs = 30 (num_epochs=30) overrides 40 ({tmp_path}/a.yaml:3)",
    ]


def test_every_setting_has_a_source_and_a_description(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "globals: {A: 1}\nprecision: {modules: {'vae.*': fp32}}\n")
    assert {"globals.A", "precision.modules.vae.*"} <= set(loaded.origins)
    for schema in SCHEMAS:
        assert [path for path, field in list_fields(schema).items() if not field.description] == []


def test_a_preset_flag_replaces_the_files_preset(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "preset: fast\n", preset="debug")
    assert (loaded.config.preset, loaded.config.train.batch_size) == ("debug", 2)
    assert load_text(tmp_path, "preset: fast\n", ["preset=null"]).config.train.batch_size == 8


@pytest.mark.parametrize("schema", [RunConfig, *SCHEMAS])
def test_every_preset_of_every_schema_names_settings_that_exist(schema: type[RunConfig]) -> None:
    assert set(schema.presets) >= {"fast", "quality", "lowmem", "stable", "debug"}
    for values in schema.presets.values():
        assert set(values) <= set(list_fields(schema))


def test_yaml_words_mean_what_their_field_takes(tmp_path: Path) -> None:
    text = "train: {fast: off, clip_norm: null, early_stopping_patience: off, deterministic: yes}\ndata: {dir: 2024}\n"
    config = load_text(tmp_path, text + "optimizer: {lr: 1e-5}\nmodel: {classes: 3}\n").config
    assert (config.train.fast, config.train.clip_norm, config.train.deterministic) == ("off", 0, True)
    assert (config.train.early_stopping_patience, config.data.dir, config.optimizer.lr) == (0, "2024", 1e-5)


def test_shorthands_for_whole_sections(tmp_path: Path) -> None:
    config = load_text(tmp_path, "optimizer: SGD\nschedule: linear\nema: true\ndata: here\n").config
    assert (config.optimizer.name, config.schedule.name, config.ema.enabled) == ("sgd", "linear", True)
    assert (config.optimizer.collect_options(), config.data.dir) == ({"momentum": 0.9}, "here")
    own = load("tiny_workload:build", overrides=["model=my_pkg.models:Net"]).config
    assert own.model.path == "my_pkg.models:Net"


def test_empty_sections_say_nothing(tmp_path: Path) -> None:
    assert load_text(tmp_path, "train:\ndata: {}\nglobals:\n").config == load("unet").config


def test_references_keep_their_type_alone_and_are_pasted_inside_text(tmp_path: Path) -> None:
    text = """
globals: {ROOT: /data, B: 4, TWICE: "${globals.B}", P: bf16-mixed}
data: {dir: "${globals.ROOT}/set-${globals.B}"}
train: {batch_size: "${globals.TWICE}", accumulate: "${globals.B}"}
precision: ${globals.P}
"""
    config = load_text(tmp_path, text).config
    assert (config.data.dir, config.train.batch_size, config.train.accumulate) == ("/data/set-4", 4, 4)
    assert config.precision.default == "bf16"
    assert config.globals == {"ROOT": "/data", "B": 4, "TWICE": 4, "P": "bf16-mixed"}
    assert load_text(tmp_path, text, ["globals.B=6"]).config.train.batch_size == 6


@pytest.mark.parametrize("as_list", [False, True])
def test_references_that_multiply_are_refused_before_they_fill_the_memory(as_list: bool) -> None:
    """Each names the one before ten times: 10^10 characters, or as many items of lists."""
    tens = [[f"${{globals.a{k}}}"] * 10 for k in range(10)]
    values = {"a0": "x"} | {f"a{k + 1}": ten if as_list else " ".join(ten) for k, ten in enumerate(tens)}
    with pytest.raises(ConfigError, match=r"\$\{globals.a\d\} is one of more than 10,000 references"):
        from_dict("unet", {"globals": values, "data": {"dir": "${globals.a10}"}})


def test_guide_3s_batch_size_global_counts_where_nothing_refers_to_it(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, DESIGN_EXAMPLE, ["globals.BATCH_SIZE_PER_GPU=4"])
    assert loaded.config.train.batch_size == 4
    assert loaded.origins["train.batch_size"].where == "globals.BATCH_SIZE_PER_GPU=4"
    text = "globals: {BATCH_SIZE_PER_GPU: 2}\ntrain: {accumulate: '${globals.BATCH_SIZE_PER_GPU}'}\n"
    assert load_text(tmp_path, text).config.train.batch_size == 8


def test_what_changes_nothing_is_noted() -> None:
    assert load("unet", overrides=["globals.X=1"]).notes == ("globals.X is set, but nothing refers to ${globals.X}",)
    (note,) = load("unet", overrides=["optimizer.nesterov=true"]).notes
    assert note == "optimizer.nesterov is not used by adamw, only by muon, sgd"


def test_different_statements_of_one_layer_name_both_with_file_key_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "num_epochs: 5\ntrain:\n  epochs: 6\n")
    path = tmp_path / "a.yaml"
    assert str(caught.value).startswith(f"`num_epochs: 5` ({path}:2) and `train.epochs: 6` ({path}:4) disagree")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.epochs=yes"], "expected a number, not true or false"),
        (["optimizer.lr=nan"], "must be a finite number"),
        (["optimizer.betas=[1, 2, 3]"], "at most 2 items"),
        (["optimizer.name=lbfgs"], "optimizer.name = 'lbfgs' (optimizer.name=lbfgs): must be 'sgd', 'adam'"),
        (["train.shard=ture"], "must be 'auto' or a valid boolean\n  fix: did you mean 'true'?"),
        (["scaler.init_scale=0.5"], "init_scale 0.5 is below min_scale 1"),
        (["model=my_pkg.models:Net"], "has a fixed model"),
        (["precision.defautl=bf16"], "did you mean precision.default"),
        (["data.dir="], "data.dir = '' (data.dir=): String should have at least 1 character"),
        (["train=5"], "`train=5`: train is a section, not a value"),
        (["train.epohcs=3"], "unknown key 'train.epohcs' (train.epohcs=3)\n  fix: did you mean train.epochs?"),
        (["data.augment.rotat=3"], "did you mean data.augment.rotate_degrees?"),
        (["trainer.presicion=16"], "did you mean precision?"),
        (["qqqqqqq=1"], "--show-config` lists every setting"),
        (["train.epochs"], "'train.epochs' is not an override"),
        (["bf16"], "fix: --precision bf16"),
        (["my.yaml"], "fix: --config-overrides-file my.yaml; or"),
        (["=3"], "is not a key"),
        (["train.milestones=[1"], "bad YAML"),
        (["preset=fsat"], "unknown preset 'fsat' (preset=fsat)\n  fix: did you mean 'fast'"),
        (["precision.modules.head=fp7"], "unknown precision 'fp7' (precision.modules.head=fp7)"),
        (["globals.AB=1", "data.dir=${globals.AC}"], "there is no global 'AC'\n  fix: did you mean 'AB'?"),
        (["data.dir=${env.HOME}"], "only ${globals.NAME} can be referenced"),
        (["data.dir=a${globals.X"], "has a ${ without }"),
        (["globals.A=${globals.B}", "globals.B=${globals.A}"], "refers to itself"),
        (
            [f"globals.A{k}=${{globals.A{k + 1}}}" for k in range(30)] + ["globals.A30=1"],
            "more than 20 references in a row",
        ),
    ],
)
def test_a_mistake_is_named_with_value_place_and_remedy(overrides: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("unet", overrides=overrides)
    assert says in str(caught.value)


def test_all_wrong_values_of_a_file_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "train:\n  epochs: many\n  batch_size: -1\n")
    path = tmp_path / "a.yaml"
    assert f"train.epochs = 'many' ({path}:3): must be a valid integer" in str(caught.value)
    assert f"train.batch_size = -1 ({path}:4): must be greater than or equal to 1" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("unett", "unknown workload 'unett'\n  fix: did you mean 'unet'?"),
        ("nowhere.yaml", "no such config file: nowhere.yaml"),
        ("some/where", "no such config file: some/where"),
        ("", "no workload is named"),
    ],
)
def test_a_target_that_does_not_exist(target: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(target)
    assert says in str(caught.value)


def test_a_file_without_a_workload_and_a_file_with_an_unknown_one(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("train: {epochs: 3}\n")
    with pytest.raises(ConfigError, match="no workload is named"):
        load(str(path))
    with pytest.raises(ConfigError, match="no workload is named"):
        load(str(path), overrides=["workload="])
    assert load(str(path), overrides=["workload=unet"]).config.train.epochs == 3
    path.write_text("\nworkload: unnet\n")
    with pytest.raises(ConfigError, match=r"unknown workload 'unnet' \(.*a\.yaml:2\)"):
        load(str(path))


def test_a_workload_of_the_users_own_has_the_shared_settings() -> None:
    loaded = load("tiny_workload:build", overrides=["model.options.width=3", "model.options.act={name: relu}"])
    assert type(loaded.config) is RunConfig
    assert loaded.config.workload == "tiny_workload:build"
    assert loaded.config.model.options == {"width": 3, "act": {"name": "relu"}}
    with pytest.raises(ConfigError, match="unknown key"):
        load("tiny_workload:build", overrides=["model.base_channels=3"])


def test_dashes_and_underscores_are_the_same_in_keys() -> None:
    assert load("unet", overrides=["train.batch-size=3", "data-dir=x"]).config.train.batch_size == 3


@given(st.lists(st.text(max_size=30), max_size=3))
def test_any_words_give_a_config_or_a_config_error(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        load("unet", overrides=words)


@given(
    key=st.sampled_from(sorted(list_fields(UNetConfig))),
    value=st.text(alphabet="0123456789.eE+-[]{},:'\"aofntrue_ ${}", max_size=12),
)
def test_any_value_for_any_setting_gives_a_config_or_a_config_error(key: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        load("unet", overrides=[f"{key}={value}"])


class OtherDefaults(RunConfig):
    defaults = {"optimizer.lr": 5e-4, "train.batch_size": 3}


class StillOthers(OtherDefaults):
    defaults = {"optimizer.weight_decay": 0.5}


def test_a_config_class_names_defaults_that_differ_and_a_subclass_adds_its_own() -> None:
    config = StillOthers(workload="x", optimizer={"eps": 1e-3})  # type: ignore[arg-type]
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.eps) == (5e-4, 0.5, 1e-3)
    assert config.train.batch_size == OtherDefaults(workload="x").train.batch_size == 3
    assert OtherDefaults(workload="x").optimizer.weight_decay == RunConfig(workload="x").optimizer.weight_decay
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValidationError, match="greater than 0"):
        StillOthers(workload="x", optimizer={"lr": -1})  # type: ignore[arg-type]
