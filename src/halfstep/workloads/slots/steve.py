"""STEVE: objects in video by predicting each frame's words from its slots."""

from halfstep.workloads.kind import Kind
from halfstep.workloads.slots.steve_config import SteveConfig

_HERE = "halfstep.workloads.slots"

KIND = Kind(
    builder=f"{_HERE}.steve_build:build",
    config=SteveConfig,
    demo=f"{_HERE}.demo:write_demo",
    random_store=f"{_HERE}.steve_random:random_store",
    random_batch=f"{_HERE}.steve_random:random_batch",
    over=f"{_HERE}.steve_build:over",
)
