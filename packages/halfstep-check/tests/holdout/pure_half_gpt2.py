import argparse

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

from lyrics import Lyrics


def get_model(name, precision):
    net = GPT2LMHeadModel.from_pretrained(name)
    if precision == "fp16":
        net = net.half()
    elif precision == "bf16":
        net = net.bfloat16()
    return net.cuda()


def train_epoch(net, loader, optimizer, clip):
    net.train()
    seen = 0
    for batch in loader:
        batch = {k: v.cuda() for k, v in batch.items()}
        out = net(**batch, labels=batch["input_ids"])
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        seen += batch["input_ids"].numel()
        if seen % 100_000 < batch["input_ids"].numel():
            print(f"{seen} tokens, loss {out.loss.item():.3f}")


@torch.no_grad()
def sample(net, tok, prompt="I walk"):
    net.eval()
    ids = tok(prompt, return_tensors="pt").input_ids.cuda()
    return tok.decode(net.generate(ids, max_new_tokens=60, do_sample=True, top_k=50)[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="gpt2-medium")
    ap.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    tok = GPT2TokenizerFast.from_pretrained(args.name)
    net = get_model(args.name, args.precision)
    optimizer = AdamW(net.parameters(), lr=5e-5)
    loader = DataLoader(Lyrics("lyrics.txt", tok), 8, shuffle=True)
    for epoch in range(args.epochs):
        train_epoch(net, loader, optimizer, 1.0)
        print(sample(net, tok))
        net.save_pretrained(f"out/{epoch}")


if __name__ == "__main__":
    main()
