import contextlib
import time

import torch
import torch.nn.functional as F
import webdataset as wds
from torchvision.models import vit_b_16
from torchvision.transforms import v2

SHARDS = "pipe:aws s3 cp s3://bucket/imagenet-train-{000000..001281}.tar -"


@contextlib.contextmanager
def half_forward(device, enabled=True):
    """bf16 forward with the flash kernel only."""
    with contextlib.ExitStack() as stack:
        if enabled:
            stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION))
        yield


class AverageMeter:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def push(self, v, k):
        self.total += v * k
        self.n += k

    @property
    def avg(self):
        return self.total / max(self.n, 1)


aug = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
mix = v2.MixUp(num_classes=1000)
loader = (
    wds.WebDataset(SHARDS, shardshuffle=True).shuffle(5000).decode("torchrgb").to_tuple("jpg", "cls")
    .map_tuple(aug, int).batched(512)
)
torch.set_float32_matmul_precision("high")
model = vit_b_16().to("cuda", memory_format=torch.channels_last)
model = torch.compile(model, mode="max-autotune")
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim <= 1]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
                        lr=3e-3, fused=True)
lr = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 300 * 2502)

for epoch in range(300):
    meter, t0 = AverageMeter(), time.perf_counter()
    for it, (img, cls) in enumerate(loader):
        img = img.to("cuda", non_blocking=True, memory_format=torch.channels_last)
        img, target = mix(img, torch.as_tensor(cls, device="cuda"))
        with half_forward("cuda"):
            logits = model(img)
            loss = F.cross_entropy(logits, target, label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        opt.step()
        lr.step()
        opt.zero_grad()
        if it % 100 == 0:
            meter.push(loss.item(), len(img))
    print(f"{epoch}: {meter.avg:.4f} in {time.perf_counter() - t0:.0f}s")
