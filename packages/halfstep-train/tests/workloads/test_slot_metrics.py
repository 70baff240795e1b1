"""FG-ARI and mBO: golden values where they are, a brute-force twin always."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from golden import golden
from halfstep_train.workloads import build, load
from halfstep_train.workloads.slots import scores as slot_metrics
from halfstep_train.workloads.slots.clusters import On, run_k_means, score_k_means, score_untrained
from halfstep_train.workloads.slots.demo import write_shard
from halfstep_train.workloads.slots.scores import SCORES, SlotMetrics, label_pixels

GOLDEN_NAMES = {name: name if name.endswith("_image") else f"{name}_video" for name in SCORES}


def test_scores_equal_the_originals() -> None:
    tensors, facts = golden("slotcontrast_metrics")
    together = SlotMetrics()
    for name, expected in facts["values"].items():
        alone = SlotMetrics()
        for metrics in (alone, together):
            metrics.add_labels(tensors[f"{name}/true"][None], tensors[f"{name}/pred"][None], expected["pred_classes"])
        found = alone.compute()
        for ours, theirs in GOLDEN_NAMES.items():
            if expected[theirs] is None:
                assert ours not in found
            else:
                assert found[ours] == pytest.approx(expected[theirs], abs=1e-12), (name, ours)
    for ours, theirs in GOLDEN_NAMES.items():
        assert together.compute()[ours] == pytest.approx(facts["over_all_pairs"][theirs]["value"], abs=1e-12)


def ari_by_pairs(true: list[int], slots: list[int]) -> float:
    """Rand index adjusted for chance, by counting pairs of pixels."""
    same = list(itertools.combinations(range(len(true)), 2))
    both = sum(true[i] == true[j] and slots[i] == slots[j] for i, j in same)
    in_true, in_slots = sum(true[i] == true[j] for i, j in same), sum(slots[i] == slots[j] for i, j in same)
    expected = in_true * in_slots / len(same) if same else 0.0
    room = (in_true + in_slots) / 2 - expected
    return (both - expected) / room if room else 1.0


def mbo_by_sets(true: list[int], slots: list[int]) -> float:
    def places(labels: list[int], label: int) -> set[int]:
        return {place for place, value in enumerate(labels) if value == label}

    objects = sorted(set(true) - {0})
    best = [
        max(len(places(true, c) & places(slots, k)) / len(places(true, c) | places(slots, k)) for k in set(slots))
        for c in objects
    ]
    return sum(best) / len(best) if best else math.nan


@pytest.mark.parametrize("seed", range(8))
def test_scores_equal_a_brute_force_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    true, slots = rng.integers(0, 4, (2, 3, 4, 5)), rng.integers(0, 3, (2, 3, 4, 5))
    slots = np.where(rng.random(true.shape) < 0.6, true % 3, slots)
    metrics = SlotMetrics()
    metrics.add_labels(torch.from_numpy(true), torch.from_numpy(slots), 3)
    clips = [(t.ravel().tolist(), s.ravel().tolist()) for t, s in zip(true, slots, strict=True)]
    frames = [(t.ravel().tolist(), s.ravel().tolist()) for t, s in zip(*(x.reshape(6, 20) for x in (true, slots)), strict=True)]  # fmt: skip # noqa: E501
    for suffix, parts in (("", clips), ("_image", frames)):
        foreground = [[(t, s) for t, s in zip(*part, strict=True) if t] for part in parts]
        fg_ari = np.mean([ari_by_pairs([t for t, _ in f], [s for _, s in f]) for f in foreground])
        found = metrics.compute()
        assert found[f"fg_ari{suffix}"] == pytest.approx(fg_ari, abs=1e-12)
        assert found[f"ari{suffix}"] == pytest.approx(np.mean([ari_by_pairs(*part) for part in parts]), abs=1e-12)
        assert found[f"mbo{suffix}"] == pytest.approx(np.mean([mbo_by_sets(*part) for part in parts]), abs=1e-12)


def test_frames_without_foreground_are_counted_and_left_out_on_request() -> None:
    true = torch.zeros(1, 2, 4, 4, dtype=torch.uint8)
    true[0, 0, :2] = 1
    true[0, 0, 2:] = 2
    slots = torch.zeros(1, 2, 4, 4, dtype=torch.long)
    for skip, expected in ((False, 0.5), (True, 0.0)):
        metrics = SlotMetrics(skip_empty=skip)
        metrics.add_labels(true, slots, 2)
        assert metrics.compute()["fg_ari_image"] == pytest.approx(expected)
        assert metrics.compute()["empty_image"] == 1


def test_frames_that_only_fill_up_a_batch_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    true, slots = (torch.randint(3, (1, 4, 6, 6), generator=generator) for _ in range(2))
    short, filled = SlotMetrics(), SlotMetrics()
    short.add_labels(true[:, :3], slots[:, :3], 3)
    filled.add_labels(true, slots, 3, torch.tensor([[True, True, True, False]]))
    assert short.compute() == filled.compute()


def test_background_can_be_an_object() -> None:
    true = torch.tensor([[[[0, 0, 1, 1]]]])
    slots = torch.tensor([[[[0, 0, 0, 1]]]])
    with_it, without = SlotMetrics(ignore_background=False), SlotMetrics()
    for metrics in (with_it, without):
        metrics.add_labels(true, slots, 2)
    assert with_it.compute()["mbo"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert without.compute()["mbo"] == pytest.approx(1 / 2)


def test_soft_masks_are_resized_some_frames_at_a_time_before_the_largest_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = torch.rand(2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).softmax(2)
    assert (label_pixels(masks, (4, 4)).flatten(2) == masks.argmax(2)).all()
    whole = label_pixels(masks, (7, 9))
    assert whole.shape == (2, 5, 7, 9)
    monkeypatch.setattr(slot_metrics, "RESIZED", 2 * 3 * 7 * 9)
    assert torch.equal(label_pixels(masks, (7, 9)), whole)


# --- k-means as a baseline for slots ---


def test_far_apart_points_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = centres.repeat_interleave(20, dim=0) + torch.randn(60, 2, generator=generator) * 0.1
    labels = run_k_means(points, 3, generator).view(3, 20)
    assert all(len(group.unique()) == 1 for group in labels)
    assert len(labels.unique()) == 3


@pytest.mark.parametrize("on", ["features", "pixels"])
def test_objects_of_two_colours_are_clusters(tmp_path: Path, on: On) -> None:
    video, masks = np.zeros((4, 32, 32, 3), np.uint8), np.zeros((4, 32, 32), np.uint8)
    for label, (corner, channel) in enumerate(((0, 0), (16, 2)), start=1):
        inside = slice(corner, corner + 16)
        video[:, inside, inside, channel], masks[:, inside, inside] = 250, label
    for part in ("train", "val"):
        write_shard(tmp_path / f"{part}-0.tar", [(video, masks)])
    words = (f"data.dir={tmp_path}", "data.image_size=32", "data.num_workers=0", "model.backbone=filters",
             "model.slots=3", "model.slot_dim=8", "model.decoder_hidden=[8]")  # fmt: skip
    config = load("slotcontrast", overrides=list(words)).config
    workload = build(config)
    assert score_k_means(workload, 3, on=on, coordinates=False)["fg_ari"] > 0.95  # masks are enlarged bilinearly
    assert score_untrained(workload)["fg_ari"] < 0.9
