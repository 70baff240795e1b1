"""Instruction tuning a causal LM in bf16, loss normalised by the number of target tokens of the whole window."""
import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from sft_data import SFTDataset, collate

IGNORE = -100


def windows(loader, size):
    buf = []
    for batch in loader:
        buf.append(batch)
        if len(buf) == size:
            yield buf
            buf = []
    if buf:
        yield buf


def token_loss(model, batch, device):
    ids = batch["input_ids"].to(device)
    labels = batch["labels"].to(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"].to(device)).logits
    return F.cross_entropy(
        logits[:, :-1].float().reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="sum"
    )


@torch.inference_mode()
def perplexity(model, loader, device):
    model.eval()
    nll = torch.zeros((), device=device, dtype=torch.float64)
    n = 0
    for batch in loader:
        nll += token_loss(model, batch, device).double()
        n += int((batch["labels"][:, 1:] != IGNORE).sum())
    model.train()
    return math.exp(nll.item() / n)


def main():
    device = torch.device("cuda")
    name = "meta-llama/Llama-3.2-1B"
    tok = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32).to(device)
    model.gradient_checkpointing_enable()
    train = DataLoader(SFTDataset("train.jsonl", tok), 2, shuffle=True, collate_fn=collate)
    dev = DataLoader(SFTDataset("dev.jsonl", tok), 4, collate_fn=collate)
    accum, epochs = 16, 2
    total = math.ceil(len(train) / accum) * epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(0.03 * total), total)
    done = 0
    for epoch in range(epochs):
        for window in windows(train, accum):
            n_tokens = sum(int((b["labels"][:, 1:] != IGNORE).sum()) for b in window)
            running = torch.zeros((), device=device)
            for batch in window:
                loss = token_loss(model, batch, device) / n_tokens
                loss.backward()
                running += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            if done % 20 == 0:
                print(f"step {done}/{total} loss {running.item():.4f} norm {norm.item():.2f}")
        print("dev ppl", perplexity(model, dev, device))
        model.save_pretrained(f"out/epoch{epoch}")


if __name__ == "__main__":
    main()
