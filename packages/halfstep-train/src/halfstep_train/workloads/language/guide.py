"""`halfstep guide` for language models."""

from __future__ import annotations

import textwrap
from functools import partial

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from halfstep_train.workloads.base.guiding import Guiding, OpenedData
from halfstep_train.workloads.language.build import check_length
from halfstep_train.workloads.language.config import LanguageConfig, get_context
from halfstep_train.workloads.language.data import open_language_data
from halfstep_train.workloads.language.texts import TokenSamples
from halfstep_train.workloads.language.tokenizers import Tokenizer

PICTURE_SIDE, FONT_SIZE, LINE_CHARACTERS, LINES = 160, 11, 24, 10
"""Of a picture of text, in pixels; the last two are what fits."""


class Guide(Guiding):
    """Guide to language models."""

    small_on_cpu = {"model.depth": 4, "model.heads": 4, "model.dim": 128}

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    def open(self, config: LanguageConfig) -> OpenedData:
        # Tokenise in memory: the guide writes nothing next to the data.
        data = open_language_data(config.replace(data={"cache": False}))
        self._tokenizer = data.tokenizer
        check_length(data.train, get_context(config))
        make_samples = partial(TokenSamples, context=get_context(config), vocab=data.vocab)
        tokenizer = data.tokenizer.to_dict() if data.tokenizer is not None else None
        return OpenedData(
            train=make_samples(data.train, is_training=True),
            val=make_samples(data.val, is_training=False),
            store={"vocab": data.vocab, "tokenizer": tokenizer},
            classes=(),
            about=data.about,
            notes=data.notes,
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw the beginning of a window as text, or as ids if there is no tokenizer."""
        ids = sample["tokens"][: LINE_CHARACTERS * LINES].tolist()
        text = self._tokenizer.decode(ids) if self._tokenizer is not None else " ".join(map(str, ids))
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, LINE_CHARACTERS) or [""]]
        picture = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE), "white")
        font = ImageFont.load_default(FONT_SIZE)
        ImageDraw.Draw(picture).multiline_text((4, 4), "\n".join(lines[:LINES]), fill="black", font=font)
        return f"window {index}", picture
