"""`halfstep detect`, with the machine faked at the driver where the answer depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import run_command
from halfstep.disk import find_cache_directory
from halfstep.hardware import measure
from halfstep.hardware.driver import Accelerator, CpuDescription, Driver
from halfstep.hardware.gpus import KNOWN

TINY = measure.Sizes(matmul=32, image=(1, 4, 8), copy_bytes=4096, budget_s=10.0)
T4 = Accelerator(kind="cuda", device="cuda:0", name="Tesla T4", capability=(7, 5), memory_total_bytes=15 * 2**30)
XEON = CpuDescription(
    cpuinfo="model name\t: Intel(R) Xeon(R) 8480\nflags\t: avx512_bf16 amx_bf16\n",
    brand="",
    features=frozenset(),
    cores=2,
    memory_total_bytes=8 * 2**30,
    memory_free_bytes=7 * 2**30,
    kernel="Linux",
)


@pytest.fixture(autouse=True)
def _small_and_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "CPU_SIZES", TINY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")


def clock(monkeypatch: pytest.MonkeyPatch, **speedups: float) -> list[str]:
    """Time by script at the driver boundary; returns what was timed."""
    timed: list[str] = []

    def time_run(self: Driver, run: Callable[[], object], device: str, *, work: str) -> float:
        timed.append(work)
        return 1e-4 / speedups.get(work.split()[-1], 1.0)

    monkeypatch.setattr(Driver, "time_run", time_run)
    return timed


def output_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    found, *said = run_command(capsys, "detect", *argv)
    assert found == code
    return said[0], said[1]


def test_a_machine_without_a_gpu_gets_a_useful_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "list_accelerators", lambda self: ())
    out, err = output_of(capsys)
    assert out.startswith("cpu  ")
    assert "\nuse " in out
    assert "halfstep detect NAME" in out
    assert err == ""


def test_a_slow_bf16_at_the_driver_flips_what_detect_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "describe_processor", lambda self: XEON)
    clock(monkeypatch, bf16=7.1)
    assert "use bf16: native on " in output_of(capsys, "cpu")[0]
    clock(monkeypatch, bf16=0.2)
    assert "use fp32: " not in output_of(capsys, "cpu")[0], "the cache was not used"
    assert "use fp32: " in output_of(capsys, "cpu", "--fresh")[0]


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    device = json.loads(output_of(capsys, "cpu", "--json")[0])["devices"][0]
    assert device["device"] == "cpu"
    assert device["source"] == "measured"
    assert {m["op"] for m in device["measurements"]} == {"matmul", "conv_nchw", "conv_nhwc"}
    assert device["bandwidth_gb_s"] > 0
    assert device["advice"]["precision"] in ("fp32", "bf16", "fp16")
    assert device["advice"]["lost"]


def test_no_measure_only_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed = clock(monkeypatch)
    device = json.loads(output_of(capsys, "cpu", "--no_measure", "--json")[0])["devices"][0]
    assert timed == []
    assert device["source"] == "probe"
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_here_is_answered_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = output_of(capsys, "v100")
    assert out.startswith("NVIDIA V100")
    assert "use fp16 with loss scaling: native on NVIDIA V100, published 8.0x fp32; not bf16: " in out
    assert output_of(capsys, "RTX", "4090")[0].startswith("NVIDIA RTX 4090")
    advice = json.loads(output_of(capsys, "h200", "--json")[0])["devices"][0]["advice"]
    assert advice["precision"] == "bf16"


def test_every_known_name_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = output_of(capsys, "list", "--json")
    listed = [name for names in json.loads(out)["gpus"].values() for name in names]
    assert listed == [gpu.name for gpu in sorted(KNOWN, key=lambda gpu: listed.index(gpu.name))]
    shown = " ".join(output_of(capsys, "list")[0].split())
    assert "H20, " in shown
    assert "NVIDIA Hopper" in shown


def test_tables_fit_eighty_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Driver, "list_accelerators", lambda self: (T4,))
    monkeypatch.setattr(Driver, "read_free_bytes", lambda self, device: 14 * 2**30)
    for argv in (("cpu",), ("b200",), ("cuda", "--no-measure")):
        out, _ = output_of(capsys, *argv)
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out.replace("6e-08 … 65504", "")


def test_a_device_that_is_not_here_is_explained_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output_of(capsys, "cuda:7", code=2)
    assert out == ""
    assert "no device 'cuda:7' on this machine" in err


def test_the_cache_follows_xdg_and_else_the_platform() -> None:
    assert find_cache_directory({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/halfstep")
    assert find_cache_directory({}).name == "halfstep"
    assert find_cache_directory({"XDG_CACHE_HOME": ""}).is_relative_to(Path.home())
