"""Config files of other projects: a family claims one, every key is translated or named, words change it first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import ConfigError
from halfstep_train.config.foreign import Foreign, resolve_document
from halfstep_train.config.load import Loaded, load
from halfstep_train.config.schema import RunConfig
from halfstep_train.config.yaml_source import parse_yaml
from halfstep_train.report.config_view import format_header

THEIRS = """
experiment: moons
globals:
  NUM_GPUS: 2
  PER_GPU: 8
  TOTAL: "${mul: ${.NUM_GPUS}, ${.PER_GPU}}"
trainer: {max_steps: 500, precision: bf16-mixed, devices: "${globals.NUM_GPUS}", log_dir: }
optimizer: {lr: !!float 5e-5, decay_steps: "${trainer.max_steps}"}
dataset: {batch_size: "${globals.TOTAL}", workers: {train: 2, val: 1}}
odd: {key: [1, 2]}
"""


class Family:
    def get_schema(self, workload: str) -> type[RunConfig]:
        return RunConfig

    def translate_config(self, document: Mapping[str, Any]) -> Foreign | None:
        if document.get("experiment") != "moons":
            return None
        return Foreign(
            workload="moons",
            values={
                "train.max_steps": document["trainer"]["max_steps"],
                "train.batch_size": document["dataset"]["batch_size"],
                "precision": document["trainer"]["precision"],
                "optimizer.lr": document["optimizer"]["lr"],
            },
            used=("experiment", "globals", "trainer.max_steps", "trainer.precision", "dataset.batch_size", "optimizer"),
            unused={"trainer.devices": "halfstep trains on one device", "dataset.workers": "workers are counted here"},
        )


class Families(dict[str, Family]):
    def of(self, workload: str, where: str = "") -> Family:
        return self[workload]

    def list_translators(self) -> Iterator[Family]:
        return iter(self.values())


def loaded(folder: Path, *words: str, text: str = THEIRS, **flags: object) -> Loaded:
    path = folder / "theirs.yaml"
    path.write_text(text)
    return load(str(path), kinds=Families(moons=Family()), overrides=words, flags=flags)


def test_a_file_without_a_workload_is_translated_by_the_family_that_knows_it(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    assert (config.workload, config.train.max_steps, config.train.batch_size) == ("moons", 500, 16)
    assert (config.precision.default, config.optimizer.lr) == ("bf16", 5e-5)


def test_every_key_is_translated_or_named_with_a_reason(tmp_path: Path) -> None:
    told = "\n".join(format_header(loaded(tmp_path)))
    assert "trainer.devices is not used: halfstep trains on one device" in told
    assert "dataset.workers.val are not used: workers are counted here" in told
    assert (
        "trainer.log_dir, odd.key are not used: not a key of such files; settings of moons can follow as KEY=VALUE"
        in told
    )
    unused = [line for line in told.splitlines() if "not used" in line]
    assert not any("max_steps" in line or "globals.PER_GPU" in line for line in unused)


def test_words_in_the_files_own_keys_change_what_follows_from_them(tmp_path: Path) -> None:
    found = loaded(tmp_path, "globals.PER_GPU=3", "trainer.precision=16-mixed", "train.epochs=7")
    assert (found.config.train.batch_size, found.config.precision.default, found.config.train.epochs) == (6, "fp16", 7)
    assert "globals.PER_GPU=3" in "\n".join(found.notes)


def test_our_own_words_and_flags_win_over_the_translation(tmp_path: Path) -> None:
    found = loaded(tmp_path, "train.batch_size=5", max_steps=9)
    assert (found.config.train.batch_size, found.config.train.max_steps) == (5, 9)
    assert {override.key for override in found.overridden} == {"train.batch_size", "train.max_steps"}


def test_a_file_that_nobody_knows_is_asked_for_its_workload(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no workload is named") as error:
        loaded(tmp_path, text="experiment: suns\n")
    assert "workload: unet" in error.value.fix
    with pytest.raises(ConfigError, match="no workload is named") as error:
        loaded(tmp_path, text="distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    assert "halfstep check" in error.value.fix


def test_a_file_with_a_workload_is_ours_even_where_a_family_would_claim_it(tmp_path: Path) -> None:
    assert loaded(tmp_path, text="workload: moons\ntrain: {epochs: 3}\n").notes == ()


def values_of(text: str) -> dict[str, Any]:
    return resolve_document(parse_yaml(text, "a.yaml").values)


def test_references_are_resolved_as_omegaconf_does() -> None:
    found = values_of(
        "a: {b: 2, c: '${.b}', d: ['${a.b}', x], e: {f: '${..b}'}}\ng: 'n${a.b}.tar'\nh: ${a.e}\ni: ${mul:${a.b},1.5}\n"
    )
    assert found["a"] == {"b": 2, "c": 2, "d": [2, "x"], "e": {"f": 2}}
    assert (found["g"], found["h"]["f"], found["i"]) == ("n2.tar", 2, 3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: ${b}\n", "refers to a key that does not exist"),
        ("a: ${b}\nb: ${a}\n", "refers to itself"),
        ("a: ${env:HOME}\n", "is an unknown function"),
        ("a: ${mul:1e14,1e14}\n", "is larger than 1e"),
        ("a: ${mul:x,2}\n", "not a number"),
        ("a: '${b'\nb: 1\n", "without"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_with_its_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        values_of(text)
    assert error.value.what.startswith(("a", "b"))
