"""Initial values of large models depend on the seed alone, not on threads, and are drawn only where they are used."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from halfstep_train.models import initial_values
from halfstep_train.models.initial_values import draw_normal_, make_bare, skip_initialisation
from halfstep_train.workloads.language.gpt2 import GPT2, GPT2Size

SIZE = GPT2Size(depth=2, heads=2, dim=64, context=32, vocab=300)


@pytest.fixture
def threads() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def drawn(seed: int, num_threads: int = 1) -> dict[str, torch.Tensor]:
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    return GPT2(SIZE).state_dict()


def test_values_follow_from_the_seed_and_not_from_the_threads(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "DRAWN_AT_ONCE", 1000)  # many pieces for each weight
    one, three, other = drawn(0), drawn(0, num_threads=3), drawn(1)
    assert all(torch.equal(one[name], three[name]) for name in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


def test_gpt2_has_its_published_deviations(threads: None) -> None:
    values = drawn(0)
    within_branch, last = values["transformer.h.0.mlp.c_fc.weight"], values["transformer.h.1.mlp.c_proj.weight"]
    # 16,384 values: the standard error of a deviation is 0.55 %.
    assert within_branch.std() == pytest.approx(0.02, rel=0.03)
    assert last.std() == pytest.approx(0.02 / math.sqrt(2 * SIZE.depth), rel=0.03)
    assert abs(within_branch.mean()) < 4 * 0.02 / math.sqrt(within_branch.numel())
    assert not values["transformer.wte.weight"][SIZE.vocab :].any()
    assert not values["transformer.h.0.attn.c_attn.bias"].any()
    assert values["transformer.ln_f.weight"].eq(1).all()


def test_no_two_pieces_or_weights_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "DRAWN_AT_ONCE", 100)
    weights = [torch.empty(300), torch.empty(300)]
    draw_normal_([(weight, 1.0) for weight in weights])
    pieces = [piece for weight in weights for piece in weight.split(100)]
    assert len({tuple(piece.tolist()) for piece in pieces}) == 6


def test_weights_of_another_dtype_are_drawn_as_well() -> None:
    torch.manual_seed(0)
    draw_normal_([(half := torch.zeros(500, dtype=torch.bfloat16), 0.5)])
    torch.manual_seed(0)
    draw_normal_([(whole := torch.zeros(500), 0.5)])
    assert torch.equal(half, whole.bfloat16())


def test_nothing_is_drawn_where_weights_are_loaded_anyway() -> None:
    weight = torch.full((10,), 7.0)
    before = torch.get_rng_state()
    with skip_initialisation():
        draw_normal_([(weight, 1.0)])
    assert weight.eq(7.0).all()
    assert torch.equal(torch.get_rng_state(), before)
    draw_normal_([(weight, 1.0)])
    assert not weight.eq(7.0).any()


def test_a_bare_layer_is_of_its_own_class_and_where_layers_are_being_made() -> None:
    layer = make_bare(nn.Linear, 4, 3, bias=False)
    assert type(layer) is nn.Linear
    assert (layer.weight.shape, layer.weight.device.type, layer.bias) == ((3, 4), "cpu", None)
    assert layer.weight.requires_grad
    with torch.device("meta"):
        assert make_bare(nn.Linear, 4, 3).weight.is_meta
        GPT2(SIZE)  # has nothing to fill
