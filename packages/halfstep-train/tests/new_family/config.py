"""Settings of the autoencoder. No torch."""

from pydantic import Field

from halfstep_train.config.schema import ModelConfig, RunConfig


class AutoencoderModel(ModelConfig):
    width: int = Field(default=8, ge=1, description="Hidden units of decoder and critic")


class AutoencoderConfig(RunConfig):
    model: AutoencoderModel = AutoencoderModel()
