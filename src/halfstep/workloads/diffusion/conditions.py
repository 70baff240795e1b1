"""What a diffusion model is told of an image: nothing, its class, or the words of a caption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data import noise
from halfstep.errors import ModelError
from halfstep.islands import fp32_island
from halfstep.models.diffusers_nets import freeze_, net_folder
from halfstep.workloads.workload import Batch


class Conditions:
    """Of an unconditional model, and what the others share: from a prepared batch to keywords of the U-Net."""

    num_classes = 0
    """With one more for "nothing said"."""
    text_dim = 0

    def dropped(self, batch: Batch, *, key: tuple[int, ...], share: float) -> Batch:
        """Part of the samples are told nothing, for classifier-free guidance."""
        return {}

    def keywords(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def nothing(self, num: int, device: torch.device) -> Batch:
        """What is told to a model that is told nothing."""
        return {}

    @property
    def is_told(self) -> bool:
        return bool(self.num_classes or self.text_dim)


class ClassConditions(Conditions):
    """A class number; the last number says nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.num_classes = tuple(names), len(names) + 1

    def dropped(self, batch: Batch, *, key: tuple[int, ...], share: float) -> Batch:
        label = batch["label"]
        return {"label": torch.where(_some(key, len(label), label.device, share), len(self.names), label)}

    def keywords(self, batch: Batch) -> dict[str, Tensor]:
        return {"class_labels": batch["label"]}

    def nothing(self, num: int, device: torch.device) -> Batch:
        return {"label": torch.full((num,), len(self.names), device=device)}


class TextConditions(Conditions):
    """Tokens, through a frozen CLIP text model."""

    def __init__(self, encoder: Any, tokenizer: Any) -> None:
        self.encoder, self.tokenizer, self.text_dim = encoder, tokenizer, int(encoder.config.hidden_size)
        self.length = min(int(tokenizer.model_max_length), int(encoder.config.max_position_embeddings))
        self._empty = self.tokens([""])

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """(N, L) numbers; what is longer than the encoder can read is cut."""
        if not captions:
            return torch.zeros(0, self.length, dtype=torch.int64)
        found = self.tokenizer(
            list(captions), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        tokens: Tensor = found["input_ids"]
        return tokens

    def dropped(self, batch: Batch, *, key: tuple[int, ...], share: float) -> Batch:
        tokens = batch["tokens"]
        drop = _some(key, len(tokens), tokens.device, share).unsqueeze(1)
        return {"tokens": torch.where(drop, self._empty.to(tokens.device), tokens)}

    def keywords(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad(), fp32_island():
            return {"encoder_hidden_states": self.encoder(batch["tokens"])[0]}

    def nothing(self, num: int, device: torch.device) -> Batch:
        return {"tokens": self._empty.to(device).expand(num, -1)}


def open_text(folder: str) -> TextConditions:
    """CLIP's text model and its tokenizer: of a pipeline, or beside each other in one folder."""
    place = net_folder(folder, "text_encoder", "model.text_encoder")
    words = place.parent / "tokenizer" if (place.parent / "tokenizer").is_dir() else place
    try:
        from transformers import CLIPTextModel, CLIPTokenizer

        with quiet_transformers():
            encoder = CLIPTextModel.from_pretrained(place, local_files_only=True, dtype=torch.float32)
        tokenizer = CLIPTokenizer.from_pretrained(words, local_files_only=True)
    except ImportError as error:
        raise ModelError("transformers is not installed", fix="pip install 'halfstep[diffusion]'") from error
    except Exception as error:  # a foreign folder can break a reader in any way
        raise ModelError(
            f"cannot open the text encoder in {Path(folder)}",
            why=" ".join(str(error).split())[:300],
            fix="a folder with text_encoder/ and tokenizer/, as Stable Diffusion has",
        ) from error
    return TextConditions(freeze_(encoder), tokenizer)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without a bar for each file it reads or writes, and without advice on packages that it could use."""
    import transformers

    logging: Any = transformers.utils.logging
    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _some(key: tuple[int, ...], num: int, device: torch.device, share: float) -> Tensor:
    return noise.uniform(key, num, (), device, stream="drop_condition") < share
