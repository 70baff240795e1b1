import argparse
import json

import torch
from PIL import Image
from torchvision import transforms
from transformers import AutoModel

prep = transforms.Compose([
    transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(),
    transforms.Normalize([0.48, 0.45, 0.41], [0.27, 0.26, 0.28]),
])


def load(name, device):
    net = AutoModel.from_pretrained(name).to(device).half()
    net.eval()
    return net


@torch.inference_mode()
def embed(net, paths, device, batch=64):
    out = []
    for i in range(0, len(paths), batch):
        x = torch.stack([prep(Image.open(p).convert("RGB")) for p in paths[i:i + batch]]).to(device).half()
        h = net(x).pooler_output.float()
        out.append((h / h.norm(dim=-1, keepdim=True).clamp_min(1e-6)).cpu())
    return torch.cat(out)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("listing")
    ap.add_argument("--model", default="facebook/dinov2-base")
    ap.add_argument("--out", default="emb.pt")
    a = ap.parse_args()
    with open(a.listing) as f:
        paths = json.load(f)
    torch.save(embed(load(a.model, "cuda"), paths, "cuda"), a.out)


if __name__ == "__main__":
    main()
