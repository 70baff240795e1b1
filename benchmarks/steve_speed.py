"""STEVE, and SlotContrast with words: a training step by stock PyTorch, written plainly and used well, and by halfstep.

    python benchmarks/steve_speed.py [--case steve] [--rows plain,plain_tuned,halfstep,halfstep_low] [--out DIR]
    python benchmarks/steve_speed.py --case lowmem --batch-sizes 4,6

`steve` is the published size: 24 clips of 3 frames at 128 pixels, a vocabulary of 4096, summed losses, dropout 0.1,
inf-norm clipped to 0.05. `lowmem` is the low-memory config of guide 3: ViT-B/14 frozen with random weights, clips of 2
frames at 336 pixels, 15 slots of 128, a vocabulary of 512, four blocks of 128 channels, the VAE recomputed. Every row
is a process of its own. Rows:

    plain         the same layers with the words as the public code writes them: dense tensors over the vocabulary,
                  Gumbel noise of torch's generator, a dense one-hot, its product with log_softmax; autocast, Adam
    plain_tuned   the same with torch.compile and fused Adam
    halfstep      `halfstep train` with train.fast=graph
    halfstep_low  the same with train.memory=low

Peak memory is the larger of max_memory_allocated before a capture and reserved memory after it. With `--at-once`
rows compile side by side and are timed one after the other (row_turns.py). `--small` is for trying this on a CPU.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep_train.bench.problem import load_bench_config
from halfstep_train.config.schema import RunConfig
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.slots.dvae import DVae
from halfstep_train.workloads.slots.scores import slot_contrast
from halfstep_train.workloads.slots.slotcontrast import SlotContrastWords
from halfstep_train.workloads.slots.steve import Steve
from halfstep_train.workloads.slots.word_decoder import WordDecoder
from recording import store
from row_turns import Turn
from step_rows import halfstep_row, rows, rows_parser, torch_row

ROWS = ("plain", "plain_tuned", "halfstep", "halfstep_low")
WARM_UP, STEPS, WINDOWS = 8, 10, 3
TAU = 0.5

WORKLOADS = {"steve": "steve", "lowmem": "slotcontrast_steve"}
SETTINGS: dict[str, tuple[str, ...]] = {
    "steve": (),
    "lowmem": (
        "model.backbone=vit_base_patch14_dinov2", "model.backbone_weights=random", "model.slots=15",
        "model.slot_dim=128", "model.vocabulary=512", "model.dvae_checkpointing=true", "data.image_size=336",
        "data.chunk_size=2",
    ),
}  # fmt: skip
SMALL: dict[str, tuple[str, ...]] = {
    "steve": (
        "data.image_size=32", "model.vocabulary=32", "model.slots=3", "model.slot_dim=16", "model.cnn_channels=8",
        "model.mlp_dim=16", "model.dim=16", "model.decoder_blocks=1",
    ),
    "lowmem": (
        "data.image_size=28", "model.backbone=vit_small_patch14_dinov2", "model.backbone_depth=1",
        "model.backbone_dim=48", "model.backbone_heads=2", "model.slots=3", "model.slot_dim=16",
        "model.decoder_hidden=[32,32]",
        "model.words_dim=16", "model.words_blocks=1", "model.vocabulary=32", "model.backbone_weights=random",
    ),
}  # fmt: skip


def main() -> None:
    parser = rows_parser(__doc__, ROWS)
    parser.add_argument("--case", choices=sorted(WORKLOADS), default="steve")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-sizes", default="", help="clips of a step; default 24 for steve, 4,6 for lowmem")
    arguments = parser.parse_args()
    if arguments.row:
        run = by_halfstep if arguments.row.startswith("halfstep") else by_torch
        print(json.dumps(run(arguments.row, arguments)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    sizes = arguments.batch_sizes or {"steve": "24", "lowmem": "4,6"}[arguments.case]
    common = ["--case", arguments.case, "--precision", arguments.precision]
    common += [f"--{name}" for name in ("small", "profile") if getattr(arguments, name)]
    names = arguments.rows.split(",")
    jobs = [["--row", row, "--batch-sizes", size, *common] for size in sizes.split(",") for row in names]
    for words, result in rows(__file__, jobs, at_once=arguments.at_once, seconds=arguments.seconds):
        found.append({"row": words[1], "batch_size": int(words[3]), **result})
        print(json.dumps(found[-1]), flush=True)
        results = {"case": arguments.case, "precision": arguments.precision, "rows": found}
        store("steve_speed" if arguments.case == "steve" else "steve_lowmem", results, device, arguments.out)


def config_of(row: str, arguments: argparse.Namespace) -> RunConfig:
    low = ("train.memory=low", "train.max_steps=10000") if row == "halfstep_low" else ()
    settings = SMALL[arguments.case] if arguments.small else SETTINGS[arguments.case]
    size = f"train.batch_size={2 if arguments.small else arguments.batch_sizes}"
    return load_bench_config(WORKLOADS[arguments.case], (*settings, size, *low), {}, small=False)


def by_halfstep(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    return halfstep_row(config_of(row, arguments), arguments.precision, profiles=arguments.profile)


# --- as the public code writes it ---


def gumbel_softmax(logits: Tensor, *, hard: bool) -> Tensor:
    noise = -(torch.empty_like(logits).exponential_() + torch.finfo(logits.dtype).tiny).log()
    soft = torch.softmax((logits + noise) / TAU, dim=1)
    if not hard:
        return soft
    one_hot = torch.zeros_like(logits).scatter_(1, soft.argmax(dim=1, keepdim=True), 1.0)
    return one_hot - soft.detach() + soft


def dense_words(
    dvae: DVae, decoder: WordDecoder, frames: Tensor, slots: Tensor, *, hard: bool
) -> tuple[Tensor, Tensor]:
    """Squared error and cross-entropy, summed over a frame; everything over the vocabulary is dense."""
    logits = torch.log_softmax(dvae.encoder(frames), dim=1)
    soft = gumbel_softmax(logits, hard=hard)
    one_hot = gumbel_softmax(logits, hard=True).detach().flatten(2).transpose(1, 2)
    mse = (frames - dvae.decoder(soft)).square().sum() / len(frames)
    predicted = decoder.head(decoder(one_hot.argmax(dim=-1), slots))
    return mse, -(one_hot * torch.log_softmax(predicted, dim=-1)).sum() / len(frames)


def steve_loss(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Steve)
    slots, _ = model.steve_encoder(batch["video"], batch["slot_draw"])
    projected = model.steve_encoder.slot_proj(slots).flatten(0, 1)
    mse, words = dense_words(model.dvae, model.steve_decoder, batch["video"].flatten(0, 1), projected, hard=False)
    return mse + words


def lowmem_loss(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, SlotContrastWords)
    video = batch["video"]
    with torch.no_grad():
        features = workload.frozen["backbone"].module(video.flatten(0, 1)).unflatten(0, video.shape[:2])
    slots = model.processor(model.initializer(len(video), None), model.encoder(features)).slots
    painted = model.decoder.mlp(slots.flatten(0, 1).unsqueeze(2) + model.decoder.pos_emb)
    recons, alpha = painted.split((model.decoder.feature_dim, 1), dim=-1)
    error = F.mse_loss((recons * torch.softmax(alpha, dim=1)).sum(1).float(), features.flatten(0, 1).float())
    contrast = slot_contrast(slots, temperature=0.1, across_batch=True)
    projected = model.slot_proj(slots).flatten(0, 1)
    mse, words = dense_words(model.dvae, model.steve_decoder, video.flatten(0, 1), projected, hard=True)
    return error + 0.5 * contrast + 0.5 * mse + words / model.steve_decoder.num_positions


LOSSES = {"steve": steve_loss, "lowmem": lowmem_loss}


def by_torch(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    turn = Turn()
    turn.begin()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(row, arguments)
    kind = KINDS[config.workload]
    made: Any = kind.synthetic.make_store(config)
    workload: Workload = kind.synthetic.build(config, made, [])
    for part in workload.frozen.values():
        part.module.to(device).eval()
    model = workload.model.to(device).train()
    is_tuned = row == "plain_tuned"
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=is_tuned)
    host = kind.make_batch(config, made)["video"]
    host = host.pin_memory() if device.type == "cuda" else host

    def loss_of(batch: Batch) -> Tensor:
        return LOSSES[arguments.case](workload, model, batch)

    def batch_of() -> Batch:
        return workload.prepare_batch({"video": host.to(device, non_blocking=True)}, key=(0,), training=True)

    run = torch.compile(loss_of) if is_tuned else loss_of
    counts = (2, 2, WINDOWS) if arguments.small else (WARM_UP, STEPS, WINDOWS)
    return torch_row(
        batch_of, run, model, optimizer, turn, precision=arguments.precision, counts=counts, clip_norm=0.05,
        norm_type=torch.inf, init_scale=1.0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
