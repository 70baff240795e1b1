import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from kinetics import Kinetics
from mvit import MViT

torch.backends.cudnn.benchmark = True


class Engine:
    def __init__(self, cfg, rank):
        self.cfg, self.rank = cfg, rank
        self.model = DistributedDataParallel(MViT(cfg).to(rank), device_ids=[rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler("cuda")
        ds = Kinetics(cfg.root, "train")
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, cfg.batch, sampler=self.sampler, num_workers=8, drop_last=True)
        self.ce = torch.nn.CrossEntropyLoss().to(rank)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        params = list(self.model.parameters())
        for cur_iter, (clip, label) in enumerate(self.loader):
            clip, label = clip.to(self.rank, non_blocking=True), label.to(self.rank, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.ce(self.model(clip), label)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(params, self.cfg.max_norm)
            if self.cfg.debug and self.rank == 0:
                print(max(p.grad.abs().max().item() for p in params))
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(params, self.cfg.max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if cur_iter % 50 == 0 and self.rank == 0:
                print(epoch, cur_iter, loss.item())

    @torch.no_grad()
    def test(self, loader):
        self.model.eval()
        hits = torch.zeros(2, device=self.rank)
        for clip, label in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                pred = self.model(clip.to(self.rank)).argmax(1)
            hits += torch.stack([(pred == label.to(self.rank)).sum(), torch.tensor(len(label), device=self.rank)])
        dist.all_reduce(hits)
        return (hits[0] / hits[1]).item()
