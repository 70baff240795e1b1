"""A custom diffusers pipeline for class-conditional models, text-conditional pixel models, and VAEs with a shift.

diffusers has no pipeline for these, so this file is copied to the exported folder as pipeline.py. It needs only
diffusers:

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    pipeline(["disc", "cross"]).images
"""

from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class ConditionalPipeline(DiffusionPipeline):
    """Sample from classes or captions with classifier-free guidance."""

    _optional_components = ["vae", "text_encoder", "tokenizer"]

    def __init__(
        self,
        unet: Any,
        scheduler: Any,
        vae: Any = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        classes: Any = None,
    ) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
        self.register_to_config(classes=list(classes) if classes else None)

    @torch.no_grad()
    def __call__(
        self,
        conditions: list[str],
        num_inference_steps: int = 50,
        guidance_scale: float = 3.0,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> Any:
        """Return one image per class name or caption; an unconditional model uses only the number of entries."""
        net, device = self.unet.config, self._execution_device
        side = net.sample_size
        state = randn_tensor((len(conditions), net.in_channels, side, side), generator=generator, device=device)
        keywords = self._make_keywords(conditions, device)
        empty = self._make_keywords([None] * len(conditions), device)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            conditional, unconditional = (self.unet(state, timestep, **given).sample for given in (keywords, empty))
            guided = unconditional + guidance_scale * (conditional - unconditional)
            state = self.scheduler.step(guided, timestep, state).prev_sample
        if self.vae is not None:
            shift = self.vae.config.shift_factor or 0.0
            state = self.vae.decode(state / self.vae.config.scaling_factor + shift).sample
        images = (state / 2 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(images) if output_type == "pil" else images)

    def _make_keywords(self, conditions: Any, device: Any) -> dict[str, Any]:
        """Return the U-Net's keyword arguments; an entry None is unconditional."""
        if self.text_encoder is None:
            names = list(self.config.classes or ())
            if not names:
                return {}
            numbers = [len(names) if one is None else names.index(one) for one in conditions]
            return {"class_labels": torch.tensor(numbers, device=device)}
        length = min(self.tokenizer.model_max_length, self.text_encoder.config.max_position_embeddings)
        tokens = self.tokenizer(
            [one or "" for one in conditions],
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        return {"encoder_hidden_states": self.text_encoder(tokens.input_ids.to(device))[0]}
