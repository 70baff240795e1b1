"""A custom fused activation with correct AMP decoration, inside a small MLP-Mixer."""
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class SquaredReLU(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, x):
        r = x.clamp(min=0)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (r,) = ctx.saved_tensors
        return 2 * r * g


class FP32LogCosh(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log(torch.cosh(x))

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.tanh(x)


class Block(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Linear(tokens, tokens)
        self.ch = nn.Linear(dim, dim)

    def forward(self, x):
        x = x + SquaredReLU.apply(self.tok(self.n1(x).transpose(1, 2))).transpose(1, 2)
        return x + SquaredReLU.apply(self.ch(self.n2(x)))


def train(loader, dim=256, tokens=64, depth=8, lr=1e-3, epochs=4):
    model = nn.Sequential(*[Block(tokens, dim) for _ in range(depth)]).cuda()
    head = nn.Linear(dim, dim).cuda()
    params = [*model.parameters(), *head.parameters()]
    opt = torch.optim.AdamW(params, lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.cuda(), y.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                out = head(model(x))
                loss = FP32LogCosh.apply(out - y).mean()
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_value_(params, 1.0)
            scaler.step(opt)
            scaler.update()
    return model, head
