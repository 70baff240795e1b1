"""What `halfstep guide` concludes from facts: data, memory, batch, learning rate, and the file it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from data.picture_folders import write_classes, write_split
from halfstep.errors import ConfigError, DataError
from halfstep.hardware.device_facts import Hardware, Measurement
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.memory import LiveBytes
from halfstep_train.guide.guide import (
    ORDER,
    QUESTIONS,
    TASK,
    Question,
    Situation,
    add_task,
    choose_batch,
    choose_learning_rate,
    describe_length,
    make_suggestions,
    read_answers,
)
from halfstep_train.guide.inspect_data import DataSummary, describe_data, inspect_data, inspect_demo, save_grid
from halfstep_train.run.memory.sizing import StepCost, predict_step_cost
from halfstep_train.workloads import from_dict, load
from halfstep_train.workloads.base.workload import OpenedData
from halfstep_train.workloads.classification import build as image_classification
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.demo import write_demo
from halfstep_train.workloads.slots.demo import write_demo as write_video_demo
from tiny_radio import write_tiny_demo

CPU = Hardware(
    kind="cpu", device="cpu", name="CPU", vendor="Arm", memory_total_bytes=8 * 2**30, support={"fp32": "native"}
)
CHEAP = StepCost(fixed_bytes=12 * 10**6, sample_bytes=10**8)


def measured(tflops: dict[str, float], *, free_gib: int = 16) -> Hardware:
    """An Ampere card with these rates."""
    rates = tuple(
        Measurement(op=op, format=name, tflops=rate, error=1e-3, speedup=rate / tflops["fp32"])
        for op in ("matmul", "conv_nchw", "conv_nhwc")
        for name, rate in tflops.items()
    )
    card = dataclasses.replace(look_up_gpu("a100"), device="cuda:0", memory_free_bytes=free_gib * 2**30)
    return dataclasses.replace(card, measurements=rates, source="measured")


AMPERE = measured({"fp32": 10.0, "tf32": 40.0, "bf16": 100.0, "fp16": 90.0})
UNTRACED = dataclasses.replace(AMPERE, name="untraced", kind="xpu", device="xpu:0")
"""A device on which every step costs CHEAP: for tests of all but the memory."""
UNTRACED_CPU = dataclasses.replace(CPU, name="untraced")


@pytest.fixture(autouse=True, scope="module")
def traced_once() -> Iterator[None]:
    """A step is traced once for each model and precision, not once for each test."""
    found: dict[str, StepCost] = {}

    def cost(config: Any, store: Any, hardware: Hardware, precision: str, known: Any) -> StepCost:
        parts = (config.workload, config.model, config.data.image_size, config.optimizer, config.train, config.ema)
        key = repr((parts, store, hardware.name, precision))
        if key not in found:
            is_traced = hardware.kind != "xpu" and hardware.name != "untraced"
            found[key] = predict_step_cost(config, store, hardware, precision) if is_traced else CHEAP
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfstep_train.guide.guide.predict_step_cost", cost)
        yield


def a_look(num_train: int = 100_000, *, num_val: int = 10, sides: Any = None, store: Any = None, **more: Any) -> Any:
    opened = OpenedData(
        train=range(num_train),  # type: ignore[arg-type]
        val=range(num_val),  # type: ignore[arg-type]
        classes=("bird", "cat"),
        counts=(num_train // 2, num_train // 2),
        store=store or {"classes": ["bird", "cat"]},
        sides=sides,
    )
    return DataSummary(folder=Path("/data"), opened=opened, **more)


def situation(**changes: Any) -> Situation:
    start = Situation(
        workload="resnet18",
        goal="fast",
        hardware=AMPERE,
        data=a_look(),
        data_dir="/data",
        device=None,
    )
    return dataclasses.replace(start, **changes)


def config(workload: str = "resnet18", **paths: Any) -> Any:
    return from_dict(workload, {"data.dir": "/data", **paths}).config


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


# The data folder.


def test_a_class_folder_is_counted_read_and_shown(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"bird": 3, "cat": 40})
    write_classes(tmp_path / "val", {"bird": 2, "cat": 2})
    look = inspect_data("resnet18", tmp_path)
    assert (look.num_train, look.num_val, look.opened.classes, look.opened.counts) == (43, 4, ("bird", "cat"), (3, 40))
    shown = dict(describe_data(look))
    assert shown["classes"] == "2: bird (3), cat (40)"
    assert "13 times" in shown["balance"]
    save_grid(look, tmp_path / "grid.png")
    assert [caption for caption, _ in look.pictures] == ["bird", "bird", "cat", "cat"]
    assert size_of(tmp_path / "grid.png")[0] > 600


def test_masks_are_looked_at_as_training_reads_them(tmp_path: Path) -> None:
    write_demo(tmp_path / "pairs", num_images=10)
    look = inspect_data("unet", tmp_path / "pairs")
    assert (look.num_train, look.num_val, look.opened.classes) == (9, 1, ("mask value 0", "mask value 255"))
    assert look.opened.counts == ()
    assert look.opened.store["num_classes"] == 2


def test_a_few_bad_files_are_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDER, "fast", ("fast",))
    write_split(tmp_path)
    (tmp_path / "train" / "cat" / "bad.jpg").write_text("no picture")
    look = inspect_data("resnet18", tmp_path)
    assert (look.num_train, look.on_bad_file) == (8, "skip")
    assert "bad.jpg" in dict(describe_data(look))["bad files"]
    chosen = make_suggestions(situation(data=look, data_dir=str(tmp_path), hardware=UNTRACED))[0]
    assert chosen.config.data.on_bad_file == "skip"


def test_a_wrong_folder_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        inspect_data("unet", tmp_path / "gone")
    with pytest.raises(DataError, match="cannot read"):
        inspect_data("unet", tmp_path / ("x" * 300))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no class folders"):
        inspect_data("resnet18", tmp_path)


def test_a_text_is_tokenised_in_memory_and_its_windows_are_shown(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("To be, or not to be.\n" * 400)
    found = inspect_data("gpt2", tmp_path / "texts")
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["a.txt"], "nothing is written next to the data"
    assert (found.num_train, found.num_val) == (6, 1)
    rows = dict(describe_data(found))
    assert rows["tokenizer"] == "bytes, 257 tokens; in memory"
    assert "classes" not in rows
    caption, picture = found.pictures[0]
    assert caption == "window 0"
    assert picture.convert("L").getextrema() == (0, 255), "black on white"
    made = make_suggestions(situation(workload="gpt2", data=found, data_dir=str(tmp_path / "texts"), hardware=UNTRACED))
    assert [one.name for one in made] == ["fast", "lowmem", "stable"]
    assert made[0].config.precision.default == "bf16"


@pytest.mark.parametrize(("workload", "remark"), [("steve", ""), ("slotcontrast", "model.backbone_weights=FILE")])
def test_videos_are_cut_into_clips_and_what_training_needs_is_pointed_out(
    tmp_path: Path, workload: str, remark: str
) -> None:
    write_video_demo(tmp_path / "videos", num_train=4, num_val=2, frames=6, side=32, per_shard=4)
    found = inspect_data(workload, tmp_path / "videos")
    assert found.num_val == 2
    assert "the first video has 32×32 pixels; masks to score with" in dict(describe_data(found))["a clip"]
    assert found.pictures[0][1].size == (32, 32)
    asked = situation(workload=workload, data=found, data_dir=str(tmp_path / "videos"), hardware=UNTRACED)
    facts = dict(make_suggestions(asked)[0].facts)
    assert remark in facts.get("backbone", "")
    many = dataclasses.replace(asked, data=a_look(store=found.opened.store))
    assert describe_length(make_suggestions(many)[0].config, 100_000).endswith("00,000 steps"), "max_steps ends it"
    on_cpu = make_suggestions(dataclasses.replace(asked, hardware=UNTRACED_CPU))[0]
    assert on_cpu.config.data.image_size == 64


def test_demo_data_are_looked_at_with_their_own_image_size(tmp_path: Path) -> None:
    look = inspect_demo("unet", tmp_path / "demo")
    assert (look.is_demo, look.num_train) == (True, 80)
    assert inspect_demo("unet", tmp_path / "demo").num_train == 80, "a second look reads the same folder"


# Memory.


def test_counted_memory_is_near_that_of_real_tensors() -> None:
    small = config(**{"data.image_size": 32, "model.width": 8, "train.batch_size": 64})
    store = {"classes": ["a", "b"]}
    model = image_classification.build_model(small, store)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with LiveBytes() as live:
        F.cross_entropy(model(torch.zeros(64, 3, 32, 32)), torch.zeros(64, dtype=torch.long)).backward()
    # Loaded and prepared pictures come on top, and a GPU's allocator hands out whole blocks.
    assert predict_step_cost(small, store, CPU, "fp32").sample_bytes == pytest.approx(live.peak / 64, rel=0.2)


def test_memory_of_the_reference_unet_is_near_what_hooks_counted() -> None:
    cost = predict_step_cost(config("unet"), {"num_classes": 2, "channels": 3, "image_size": 512}, CPU, "fp32")
    # Not all gradients are there when memory is highest.
    assert 31_037_698 * 12 <= cost.fixed_bytes <= 31_037_698 * 16.1
    # The hooks count what forward saves; the peak lies in backward, where gradients of activations come on top.
    counted_bytes = 1.29 * 2**30
    assert counted_bytes < cost.sample_bytes < 1.2 * counted_bytes


def test_half_precision_and_recomputing_save_memory() -> None:
    store = {"classes": ["a", "b"]}
    full, half = (predict_step_cost(config(), store, CPU, precision) for precision in ("fp32", "bf16"))
    assert half.sample_bytes < 0.7 * full.sample_bytes
    assert half.fixed_bytes > full.fixed_bytes, "autocast keeps half copies of the weights"
    recomputed = predict_step_cost(config(**{"train.activation_checkpointing": True}), store, CPU, "fp32")
    assert recomputed.sample_bytes < 0.8 * full.sample_bytes
    known: dict[str, Any] = {}
    shared = [
        predict_step_cost(config(**{"train.activation_checkpointing": on}), store, CPU, "fp32", known)
        for on in (False, True)
    ]
    assert [one.predict_bytes(8) for one in shared] == [full.predict_bytes(8), recomputed.predict_bytes(8)]


# Batch and learning rate.


def test_the_batch_keeps_the_recipe_where_it_fits() -> None:
    paths, facts = choose_batch(situation(), "stable", config(), CHEAP)
    assert paths == {"train.batch_size": 64, "train.accumulate": 1}
    assert "an estimate" in dict(facts)["memory"]


def test_fast_takes_a_larger_batch_where_memory_allows() -> None:
    assert choose_batch(situation(), "fast", config(), CHEAP)[0] == {"train.batch_size": 128, "train.accumulate": 1}
    huge = situation(hardware=measured({"fp32": 1.0}, free_gib=1000))
    assert choose_batch(huge, "fast", config(), CHEAP)[0]["train.batch_size"] == 256, "four times the recipe, not more"


def test_too_little_memory_is_made_up_by_accumulation() -> None:
    tight = situation(hardware=measured({"fp32": 1.0}, free_gib=1))
    assert choose_batch(tight, "fast", config(), CHEAP)[0] == {"train.batch_size": 8, "train.accumulate": 8}
    too_large = dataclasses.replace(CHEAP, sample_bytes=10**12)
    paths, facts = choose_batch(tight, "fast", config(), too_large)
    assert paths["train.batch_size"] == 1
    assert "NOT EVEN ONE SAMPLE FITS" in dict(facts)["memory"]


def test_a_small_set_gets_a_batch_that_makes_ten_steps() -> None:
    few = situation(data=a_look(320))
    paths, facts = choose_batch(few, "quality", config(), CHEAP)
    assert paths == {"train.batch_size": 32, "train.accumulate": 1}
    assert "320 samples make 10 steps" in dict(facts)["batch"]


@pytest.mark.parametrize(
    ("start", "samples", "peak", "words"),
    [
        (config(), 256, 0.4, "0.4 = 0.1 x 256/64 (linear"),
        (config(), 64, 0.1, "the recipe's own"),
        (config("unet"), 32, 0.002, "0.002 = 0.001 x sqrt(32/8)"),
        (config("vit_s_16"), 256, 2.5e-4, "0.00025 = 0.0005 x 256/512 (linear"),
    ],
)
def test_the_learning_rate_follows_the_batch_by_a_rule_that_is_shown(
    start: Any, samples: int, peak: float, words: str
) -> None:
    paths, (_, shown) = choose_learning_rate(start, samples)
    assert words in shown
    said = config(start.workload, **paths, **{"train.batch_size": samples})
    assert said.optimizer.compute_peak_lr(samples) == pytest.approx(peak)


# Suggestions.


@pytest.mark.parametrize(
    ("workload", "goal"),
    [
        ("resnet18", "quality"),
        ("resnet18", "lowmem"),
        ("unet", "quality"),
        ("vit_s_16", "fast"),
    ],
)
def test_every_suggestions_file_loads_as_the_config_that_was_shown(tmp_path: Path, workload: str, goal: str) -> None:
    store = {"num_classes": 2, "channels": 3} if workload == "unet" else {"classes": ["a", "b"]}
    look = a_look(store=store)
    hardware = AMPERE if workload == "resnet18" else UNTRACED
    found = make_suggestions(situation(workload=workload, goal=goal, data=look, hardware=hardware))
    assert [one.name for one in found] == list(ORDER[goal])
    for one in found:
        path = tmp_path / f"{one.name}.yaml"
        path.write_text(one.to_yaml())
        assert load(str(path)).config == one.config
        assert one.config.precision.default == ("fp32" if one.name == "stable" else "bf16")


def test_without_a_gpu_models_are_smaller_and_nothing_is_compiled() -> None:
    for one in make_suggestions(situation(hardware=UNTRACED_CPU)):
        assert one.config.precision.default == "fp32"
        assert one.config.data.image_size == 128
        assert one.config.train.fast != "compile"
        assert "on a CPU" in dict(one.facts)


@pytest.mark.parametrize(
    ("workload", "sides", "expected"),
    [
        ("unet", (96, 80), {"data.image_size": 96}),
        ("unet", (16, 16), {"data.image_size": 32}),
        ("resnet50", (28, 28), {"data.image_size": 32, "model.stem": "small", "data.eval_size": 0}),
        ("vit_s_16", (64, 64), {"data.image_size": 64, "model.patch": 8}),
    ],
)
def test_images_are_not_larger_than_the_pictures(
    workload: str, sides: tuple[int, int], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORDER, "fast", ("fast",))
    store = {"channels": 3, "num_classes": 2, "classes": ["a", "b"], "image_size": 512}
    look = a_look(sides=sides, store=store)
    for one in make_suggestions(situation(workload=workload, data=look, hardware=UNTRACED)):
        found = {key: getattr(getattr(one.config, key.split(".")[0]), key.split(".")[1]) for key in expected}
        assert found == expected
        shown = dict(one.facts).get("image size", "")
        assert (f"{sides[0]}×{sides[1]}" in shown) == (sides[0] < 512)


def test_demo_data_keep_their_own_recipe() -> None:
    look = a_look(80, is_demo=True, store={"num_classes": 2, "channels": 3})
    found = make_suggestions(
        situation(workload="unet", goal="quality", data=look, data_dir=None, hardware=UNTRACED_CPU)
    )
    assert len(found) == 2, "quality and fast would be the same run"
    for one in found:
        assert one.config.data.dir is None
        assert one.config.data.image_size == UNetConfig.demo["data.image_size"]
        assert one.config.train.epochs == UNetConfig.demo["train.epochs"]


# Answers and files.


def test_a_model_alone_says_which_task_it_is_for() -> None:
    assert add_task({"model": "radiodiff"})["task"] == "radio maps"
    assert add_task({"model": "vit_b_16", "task": "language"})["task"] == "language"
    assert "task" not in add_task({"goal": "fast"})


def test_a_choice_is_understood_by_name_number_and_beginning() -> None:
    question = Question(key="goal", text="?", choices={"fast": "", "quality": ""})
    assert [question.choose(word) for word in ("fast", "2", "Q")] == ["fast", "quality", "quality"]
    assert [TASK.choose(name) for name in TASK.choices] == list(TASK.choices)
    for wrong in ("", "3", "fastest", "slow"):
        with pytest.raises(ConfigError, match="is not one of the choices"):
            question.choose(wrong)


@pytest.mark.parametrize("workload", ["radiodiff_vae", "radiodiff"])
def test_both_stages_of_radio_maps_are_suggested_for_a_cpu(tmp_path: Path, workload: str) -> None:
    root = write_tiny_demo(tmp_path / "RadioMapSeer")
    looked = inspect_data(workload, root)
    chosen = make_suggestions(situation(workload=workload, data=looked, hardware=UNTRACED_CPU, data_dir=str(root)))[0]
    (tmp_path / "run.yaml").write_text(chosen.to_yaml())
    again = load(str(tmp_path / "run.yaml")).config
    assert (again.workload, again.data.image_size, again.model.first_stage.width) == (workload, 64, 16)


@pytest.mark.parametrize(
    "text", ["task: segmentation\nstart: yes\npick: 1\n", '{"task": "seg", "start": "yes", "pick": 1}']
)
def test_answers_come_from_yaml_and_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "answers"
    path.write_text(text)
    answers = read_answers(path, QUESTIONS)
    assert answers["task"].startswith("seg")
    assert answers["pick"] == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("taks: language", "no question 'taks'"),
        ("task: paint", "'paint' is not one of the choices"),
        ("task: [language]", "task is"),
        ("task: language\ntask: language", "task"),
        ("just text", "just text"),
    ],
)
def test_wrong_answers_are_told_at_once(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "answers.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="answers.yaml|is not one of the choices") as caught:
        read_answers(path, QUESTIONS)
    assert message in str(caught.value)
