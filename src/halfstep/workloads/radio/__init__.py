"""Radio maps: path gain of a transmitter in a city, by RadioDiff's two stages."""

from halfstep.workloads.kind import Kind
from halfstep.workloads.radio.config import RadioDiffConfig, RadioVaeConfig

_HERE = "halfstep.workloads.radio"
_ABOUT = "path gain of a transmitter from buildings and antenna: RadioMapSeer's png/ and gain/"

VAE_KIND = Kind(
    builder=f"{_HERE}.build_vae:build_vae",
    config=RadioVaeConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    export=f"{_HERE}.build_vae:export",
    unit="map",
    task="radio maps, first stage",
    about=_ABOUT,
)

KIND = Kind(
    builder=f"{_HERE}.build:build",
    config=RadioDiffConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.random_data:random_store",
    random_batch=f"{_HERE}.random_data:random_batch",
    over=f"{_HERE}.random_data:over",
    unit="map",
    task="radio maps",
    about=_ABOUT,
)
