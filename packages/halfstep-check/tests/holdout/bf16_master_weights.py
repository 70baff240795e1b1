"""bf16 parameters with hand-kept float32 masters: the optimizer only ever sees the float32 copies."""
import torch
import torch.nn.functional as F

from tiny_gpt import TinyGPT, batches


class MasterAdamW:
    """AdamW over float32 copies of a low-precision model."""

    def __init__(self, model, **kw):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().clone().float().requires_grad_(True) for p in self.low]
        self.opt = torch.optim.AdamW(self.master, **kw)

    def clip(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.master, max_norm)

    def pull_grads(self):
        for m, p in zip(self.master, self.low):
            m.grad = None if p.grad is None else p.grad.float()
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.opt.step()
        for m, p in zip(self.master, self.low):
            p.copy_(m)

    def state_dict(self):
        return {"opt": self.opt.state_dict(), "master": self.master}


def lm_loss(model, x, y):
    logits = model(x)
    return F.cross_entropy(logits.float().view(-1, logits.size(-1)), y.view(-1))


def main(steps=10_000):
    torch.manual_seed(0)
    model = TinyGPT().cuda()
    opt = MasterAdamW(model, lr=3e-4, weight_decay=0.1)
    model = model.to(torch.bfloat16)
    opt.low = [p for p in model.parameters() if p.requires_grad]
    for step, (x, y) in zip(range(steps), batches("train", device="cuda")):
        loss = lm_loss(model, x, y)
        loss.backward()
        opt.pull_grads()
        opt.clip(1.0)
        opt.step()
        if step % 100 == 0:
            print(step, loss.item())
        if step % 1000 == 999:
            with torch.no_grad():
                val = torch.stack([lm_loss(model, *b) for _, b in zip(range(20), batches("val", device="cuda"))]).mean()
            print("val", val.item())
            torch.save({"model": model.state_dict(), **opt.state_dict()}, "ckpt.pt")


if __name__ == "__main__":
    main()
