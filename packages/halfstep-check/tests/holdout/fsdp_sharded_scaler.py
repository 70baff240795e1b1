import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from summaries import Summaries

fp16_policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def train(model, rank, loader, optimizer, epoch, scaler, sampler):
    model.train()
    sampler.set_epoch(epoch)
    stats = torch.zeros(2, device=rank)
    for batch in loader:
        batch = {k: v.to(rank) for k, v in batch.items()}
        optimizer.zero_grad()
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        stats[0] += loss.detach()
        stats[1] += len(batch["input_ids"])
    dist.all_reduce(stats)
    if rank == 0:
        print(f"epoch {epoch} loss {(stats[0] / stats[1]).item():.4f}")


def validate(model, rank, loader):
    model.eval()
    stats = torch.zeros(2, device=rank)
    with torch.no_grad():
        for batch in loader:
            out = model(**{k: v.to(rank) for k, v in batch.items()})
            stats += torch.stack([out.loss.float(), torch.ones((), device=rank)])
    dist.all_reduce(stats)
    return stats[0] / stats[1]


def main():
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    model = T5ForConditionalGeneration.from_pretrained("t5-large")
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    model = FSDP(model, auto_wrap_policy=wrap, mixed_precision=fp16_policy, device_id=rank)
    train_set, val_set = Summaries("train"), Summaries("val")
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 8, sampler=sampler, num_workers=2, pin_memory=True)
    val = DataLoader(val_set, 8, sampler=DistributedSampler(val_set, shuffle=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.85)
    scaler = ShardedGradScaler()
    for epoch in range(4):
        train(model, rank, loader, optimizer, epoch, scaler, sampler)
        print(validate(model, rank, val).item())
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
