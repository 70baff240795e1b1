import os

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader
from transformers import CLIPTextModel, CLIPTokenizer

from captions import CaptionedImages

BASE = "runwayml/stable-diffusion-v1-5"


def build(device):
    vae = AutoencoderKL.from_pretrained(BASE, subfolder="vae").to(device, dtype=torch.float16)
    text = CLIPTextModel.from_pretrained(BASE, subfolder="text_encoder").to(device, dtype=torch.float16)
    unet = UNet2DConditionModel.from_pretrained(BASE, subfolder="unet").to(device)
    vae.requires_grad_(False)
    text.requires_grad_(False)
    unet.enable_gradient_checkpointing()
    return vae, text, unet


def main(max_steps=50_000, bs=4, lr=1e-5, out="sd-ft"):
    device = torch.device("cuda")
    vae, text, unet = build(device)
    noise_scheduler = DDPMScheduler.from_pretrained(BASE, subfolder="scheduler")
    tok = CLIPTokenizer.from_pretrained(BASE, subfolder="tokenizer")
    ema_unet = EMAModel(unet.parameters(), decay=0.9999)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=lr)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=500, num_training_steps=max_steps)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(CaptionedImages("pokemon", tok), bs, shuffle=True, drop_last=True)
    step = 0
    while step < max_steps:
        for px, ids in loader:
            px, ids = px.to(device), ids.to(device)
            with torch.no_grad():
                latents = vae.encode(px.to(torch.float16)).latent_dist.sample() * vae.config.scaling_factor
                cond = text(ids)[0]
            latents = latents.float()
            noise = torch.randn_like(latents)
            t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bs,), device=device)
            noisy = noise_scheduler.add_noise(latents, noise, t)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = unet(noisy, t, cond).sample
            loss = F.mse_loss(pred.float(), noise)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            ema_unet.step(unet.parameters())
            step += 1
            if step % 500 == 0:
                print(step, loss.item())
    ema_unet.copy_to(unet.parameters())
    unet.save_pretrained(os.path.join(out, "unet"))


if __name__ == "__main__":
    main()
