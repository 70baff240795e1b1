"""GPT-2 against transformers' GPT2LMHeadModel, its files and nanoGPT's, and its cache of keys and values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from halfstep.errors import ModelError
from halfstep_train.models import initial_values
from halfstep_train.models.initial_values import draw_normal_, make_bare, skip_initialisation
from halfstep_train.workloads.language.gpt2 import GPT2, GPT2Size, build_gpt2
from halfstep_train.workloads.language.gpt2_weights import load_gpt2_, save_gpt2, to_transformers

SMALL: dict[str, Any] = {"depth": 2, "heads": 2, "dim": 16, "context": 12, "vocab": 70}


def save(model: GPT2, folder: Path) -> None:
    save_gpt2(model.state_dict(), model.size, folder)


def small(**options: Any) -> GPT2:
    torch.manual_seed(0)
    model = build_gpt2("gpt2", **{**SMALL, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and gains are zeros and ones in a new model, which would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def ids(seed: int = 0, length: int = 12) -> torch.Tensor:
    return torch.randint(70, (2, length), generator=torch.Generator().manual_seed(seed))


def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_loads_our_folder_and_gives_our_logits(tmp_path: Path, bias: bool) -> None:
    model = small(bias=bias).eval()
    save(model, tmp_path)
    tokens = ids()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path)(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_a_folder_of_transformers_loads_and_gives_its_logits_and_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=12, vocab_size=70)
    original = transformers.GPT2LMHeadModel(config).eval()
    original.save_pretrained(tmp_path)
    model = small().eval()
    load_gpt2_(model, tmp_path)
    tokens = ids()
    found = original(tokens, labels=tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), found.logits, rtol=1e-5, atol=1e-5)
        loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(found.loss.item(), rel=1e-5)


def test_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    model = small()
    save(model, tmp_path)
    other = theirs(tmp_path)
    tokens = ids()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    other(tokens, labels=tokens).loss.backward()
    for name, parameter in other.named_parameters():
        own = dict(model.named_parameters())[name].grad
        assert own is not None
        own = own.t() if "c_" in name and name.endswith("weight") else own
        torch.testing.assert_close(own[: len(parameter)], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_released_files_without_a_prefix_and_with_masks_load(tmp_path: Path) -> None:
    model, other = small(), small()
    with torch.no_grad():
        other.transformer.wte.weight.add_(1.0)
    weights = {
        name.removeprefix("transformer."): tensor
        for name, tensor in to_transformers(model.state_dict(), model.size).items()
    }
    weights["h.0.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
    save_file(weights, tmp_path / "model.safetensors")
    load_gpt2_(other, tmp_path / "model.safetensors")
    assert torch.equal(other.transformer.wte.weight, model.transformer.wte.weight)
    assert torch.equal(other.transformer.h[1].attn.c_proj.weight, model.transformer.h[1].attn.c_proj.weight)


@pytest.mark.parametrize(
    ("index", "save"), [("model.safetensors.index.json", save_file), ("pytorch_model.bin.index.json", torch.save)]
)
def test_shards_of_a_folder_are_read_together(tmp_path: Path, index: str, save: Callable[[Any, Path], None]) -> None:
    model, other = small(), small()
    weights, ending = list(to_transformers(model.state_dict(), model.size).items()), index.split(".")[1]
    parts = {f"a.{ending}": dict(weights[:9]), f"b.{ending}": dict(weights[9:])}
    for name, part in parts.items():
        save(part, tmp_path / name)
    names = {tensor: name for name, part in parts.items() for tensor in part}
    (tmp_path / index).write_text(json.dumps({"weight_map": names}))
    for named in (tmp_path, tmp_path / index):
        with torch.no_grad():
            other.transformer.ln_f.weight.zero_()
        load_gpt2_(other, named)
        assert torch.equal(other.transformer.ln_f.weight, model.transformer.ln_f.weight)
    (tmp_path / f"b.{ending}").unlink()
    with pytest.raises(ModelError, match=rf"b\.{ending}"):
        load_gpt2_(other, tmp_path)


def test_a_checkpoint_of_nanogpt_loads_with_its_padded_vocabulary(tmp_path: Path) -> None:
    """Linear layers as torch has them, compiled names, 128 rows for a vocabulary of 70, tensors next to the weights."""
    model = small(bias=False)
    weights = {f"_orig_mod.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    embedding = torch.randn(128, 16)
    embedding[:70] = model.transformer.wte.weight[:70].detach()
    weights["_orig_mod.transformer.wte.weight"] = weights["_orig_mod.lm_head.weight"] = embedding
    content = {"model": weights, "model_args": {"n_layer": 2}, "iter_num": 5, "best_val_loss": torch.tensor(1.5)}
    torch.save(content, tmp_path / "ckpt.pt")
    other = small(bias=False, dropout=0.1).eval()
    load_gpt2_(other, tmp_path / "ckpt.pt")
    with torch.no_grad():
        assert torch.equal(other(ids()), model.eval()(ids()))
    assert not other.transformer.wte.weight[70:].any(), "rows past the vocabulary are padding"


def test_a_context_longer_than_the_weights_is_refused_and_a_shorter_one_taken(tmp_path: Path) -> None:
    save(small(), tmp_path)
    with pytest.raises(ModelError, match=r"model\.context=24 .* 12 tokens"):
        load_gpt2_(small(context=24), tmp_path)
    load_gpt2_(small(context=5), tmp_path)


def test_an_output_layer_of_its_own_and_other_models_are_refused(tmp_path: Path) -> None:
    weights = dict(to_transformers(small().state_dict(), small().size))
    save_file(weights | {"lm_head.weight": torch.zeros(70, 16)}, tmp_path / "untied.safetensors")
    with pytest.raises(ModelError, match="has a separate output layer"):
        load_gpt2_(small(), tmp_path / "untied.safetensors")
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.safetensors")
    with pytest.raises(ModelError, match="contains no GPT-2"):
        load_gpt2_(small(), tmp_path / "resnet.safetensors")


def test_the_loss_is_that_of_the_logits_and_the_padded_tokens_have_no_chance() -> None:
    model, targets = small(), ids(1)
    targets[0, :5] = -1
    loss = model(ids(), targets)
    plain = F.cross_entropy(model(ids()).flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)


def test_keys_and_values_that_were_kept_give_the_logits_of_the_whole_text() -> None:
    model, tokens = small().eval(), ids()
    memories = model.make_caches()
    with torch.no_grad():
        whole = model(tokens)
        pieces = [model.compute_next_logits(piece, memories) for piece in tokens.split([4, 1, 3, 1, 3], dim=1)]
    for found, end in zip(pieces, (3, 4, 7, 8, 11), strict=True):
        torch.testing.assert_close(found, whole[:, end], rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # compiles the whole model
def test_a_compiled_model_gives_its_loss_and_gradients_with_the_chunks_left_out_of_the_graph() -> None:
    plain, compiled = small(), small()
    run = torch.compile(compiled, backend="aot_eager")
    for model, loss in ((plain, plain(ids(), ids(1))), (compiled, run(ids(), ids(1)))):
        loss.backward()
        assert loss.item() > 0
        assert all(parameter.grad is not None for parameter in model.parameters())
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_operations_are_counted_on_tensors_without_content() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = small().to("meta")
    tokens = ids().to("meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    rows, dim, vocab = tokens.numel(), 16, 128
    in_blocks, attention = 12 * dim**2 * 2, 2 * 2 * 12 * dim  # two blocks; scores and values, 12 keys for each query
    assert counter.get_total_flops() == pytest.approx(6 * rows * (in_blocks + attention + vocab * dim), rel=0.2)


def test_weights_of_other_heads_are_refused_with_the_settings_that_fit(tmp_path: Path) -> None:
    """Shapes are the same: only config.json tells."""
    save(small(), tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ModelError, match=r"model\.heads 2, here 4") as error:
            load_gpt2_(small(heads=4), path)
        assert error.value.fix == "model.depth=2 model.heads=2 model.dim=16"
        with pytest.raises(ModelError, match="a different size") as error:
            load_gpt2_(small(heads=4, context=99), path)
        assert error.value.fix.endswith("model.context=12")  # in the same message: one try is enough


def test_a_checkpoint_of_nanogpt_names_its_heads_and_biases(tmp_path: Path) -> None:
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": False, "vocab_size": 70}
    torch.save({"model": small(bias=False).state_dict(), "model_args": args}, tmp_path / "ckpt.pt")
    load_gpt2_(small(bias=False), tmp_path)
    with pytest.raises(ModelError, match="a different size") as error:
        load_gpt2_(small(heads=4), tmp_path / "ckpt.pt")
    assert error.value.fix == "model.depth=2 model.heads=2 model.dim=16 model.bias=false"


def test_a_description_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    save(small(), tmp_path)
    (tmp_path / "config.json").write_text('{"n_head": 4,')
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load_gpt2_(small(), tmp_path)
    (tmp_path / "config.json").write_text('{"n_head": 4}')  # as the first files had it, without model_type
    with pytest.raises(ModelError, match=r"model\.heads 4, here 2"):
        load_gpt2_(small(), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("activation_function", "relu"), ("layer_norm_epsilon", 1e-12), ("n_inner", 20)]
)
def test_weights_of_another_function_are_refused(tmp_path: Path, key: str, value: object) -> None:
    save(small(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{key}={value!r}"):
        load_gpt2_(small(), tmp_path)


def test_a_model_without_an_end_says_so_to_transformers(tmp_path: Path) -> None:
    save(small(), tmp_path)
    assert theirs(tmp_path).config.eos_token_id is None


# --- initial values depend on the seed alone, not on threads, and are drawn only where they are used ---

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
