"""BERT-style pretraining. Micro-batches hold different numbers of masked tokens."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

from wiki import MaskedWiki


def masked_loss(logits, labels, mask):
    per_token = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (per_token * mask).sum() / mask.sum()


def cycle(loader):
    while True:
        yield from loader


def pretrain(steps=100_000, accum=8, lr=1e-4, device="cuda"):
    model = BertForMaskedLM(BertConfig()).to(device)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, s / 10_000))
    data = cycle(DataLoader(MaskedWiki("wiki.arrow"), 32, shuffle=True, num_workers=4, pin_memory=True))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        logged = torch.zeros((), device=device)
        for _ in range(accum):
            batch = next(data)
            ids, labels, mask = (batch[k].to(device, non_blocking=True) for k in ("ids", "labels", "mask"))
            with torch.autocast(device_type=device, dtype=torch.bfloat16):
                logits = model(ids).logits
            loss = masked_loss(logits, labels, mask) / accum
            loss.backward()
            logged += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sched.step()
        if step % 100 == 0:
            print(step, logged.item())


if __name__ == "__main__":
    pretrain()
