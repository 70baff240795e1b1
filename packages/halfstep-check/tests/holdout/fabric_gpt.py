from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from model import GPT, GPTConfig
from data import TokenBlocks


@dataclass
class Hparams:
    micro_batch: int = 4
    accumulate: int = 8
    lr: float = 3e-4
    max_iters: int = 20000
    eval_every: int = 500


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validate(fabric, model, loader, n=50):
    model.eval()
    total = torch.zeros(n, device=fabric.device)
    for k, (x, y) in zip(range(n), loader):
        total[k] = loss_fn(model(x), y)
    model.train()
    return total.mean()


def main():
    hp = Hparams()
    fabric = L.Fabric(accelerator="cuda", devices=4, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1337)
    torch.set_float32_matmul_precision("high")
    with fabric.init_module():
        model = GPT(GPTConfig())
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.lr, betas=(0.9, 0.95), fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    train_dl, val_dl = fabric.setup_dataloaders(
        DataLoader(TokenBlocks("train.bin"), hp.micro_batch, shuffle=True),
        DataLoader(TokenBlocks("val.bin"), hp.micro_batch),
    )
    it = iter(train_dl)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    while state["step"] < hp.max_iters:
        for micro in range(hp.accumulate):
            x, y = next(it)
            last = micro == hp.accumulate - 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = loss_fn(model(x), y)
                fabric.backward(loss / hp.accumulate)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % hp.eval_every == 0:
            fabric.print(state["step"], validate(fabric, model, val_dl).item())
            fabric.save("ckpt.pth", state)


if __name__ == "__main__":
    main()
