#!/usr/bin/env python
import math

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from alpaca import Alpaca

name = "meta-llama/Llama-2-7b-hf"
tok = AutoTokenizer.from_pretrained(name)
tok.pad_token = tok.eos_token
use_bf16 = torch.cuda.is_bf16_supported()
if not use_bf16:
    raise SystemExit("this script wants a bf16 GPU")

model = AutoModelForCausalLM.from_pretrained(name)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])).cuda()
model.print_trainable_parameters()
trainable = [p for p in model.parameters() if p.requires_grad]
optim = torch.optim.AdamW(trainable, lr=2e-4)
scaler = torch.amp.GradScaler("cuda")

loader = DataLoader(Alpaca("alpaca.json", tok), batch_size=4, shuffle=True)
steps = 3 * len(loader)
sched = get_cosine_schedule_with_warmup(optim, 100, steps)

model.train()
n = 0
for epoch in range(3):
    for batch in loader:
        batch = {k: v.cuda() for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        torch.nn.utils.clip_grad_norm_(trainable, 0.3)
        s = scaler.get_scale()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        if s <= scaler.get_scale():
            sched.step()
        n += 1
        if n % 10 == 0:
            print(f"{n}/{steps} loss {loss.item():.4f} ppl {math.exp(loss.item()):.2f}")
    model.save_pretrained(f"lora-{epoch}")
