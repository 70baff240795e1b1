"""The README's speed table says what the stored rows say, and the scripts that make them stand on this machine."""

from __future__ import annotations

import fcntl
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from halfstep.hardware.probe import probe
from halfstep_train.bench.measure_row import Row
from halfstep_train.bench.problem import build_problem, load_bench_config
from warm_processes import FORKED

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


def row(name: str, variant: str, ms: float, peak_gb: float) -> dict[str, Any]:
    windows = (ms, ms * 0.99, ms * 1.01)
    known = {"window_ms": windows, "peak_bytes": int(peak_gb * 1e9), "loss": 0.7, "floor_ms": 10.0}
    return Row(name=name, variant=variant, precision="bf16", joules_per_sample=1.5, **known).to_dict()


def unet_problem() -> dict[str, Any]:
    rows = [row("halfstep", "auto", 20.0, 4.0), row("plain", "documented", 44.0, 6.0)]
    rows += [row("lightning", "documented", 40.0, 5.9), row("plain", "tuned", 26.0, 5.95)]
    rows += [row("plain", "graphs", 25.0, 6.1)]
    rows.append(Row(name="accelerate", variant="tuned", precision="bf16", reason="out of memory").to_dict())
    return {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "title": "U-Net, 8", "rows": rows}


def tiny_case(**changes: Any) -> Any:
    from speed_cases import CASES

    tiny = {"title": "tiny", "workload": "own_workload:KIND", "batch_size": 2, "image_size": None}
    return replace(CASES["resnet50_64"], **tiny, **changes)


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """Loops without vector instructions, which compile in half the time; here, and in processes started from here."""
    patched: Any = inductor_config.patch({"cpp.vec_isa_ok": False})
    with pytest.MonkeyPatch.context() as monkeypatch, patched:
        monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        yield


@pytest.fixture(scope="module")
def filling(quick_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The folder of a compiler's cache that was filled for plain's tiny row, and what was said meanwhile."""
    from speed_processes import fill_caches

    folder, tiny = str(tmp_path_factory.mktemp("filled")), tiny_case(against=("plain:documented",), precision="fp32")
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(io.StringIO()) as said:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        fill_caches({"tiny": tiny}, ("graph",), probe("cpu"), at_once=1, deadline=None)
    return folder, said.getvalue()


def test_the_fastest_of_each_kind_stand_in_a_row() -> None:
    from readme_tables import speed_table

    problem = unet_problem()
    alone = {**problem, "title": "U-Net, low", "rows": problem["rows"][:1]}
    starts = {"unet": {"mode": "auto", "cold": {"s": 42.2}, "warm": {"s": 9.1}}}
    *_, table, low = speed_table({"unet": problem, "low": alone}, starts).splitlines()
    assert table == (
        "| U-Net, 8 | 20.0 ms (19.8 to 20.2), auto | 40.0 ms (39.6 to 40.4), lightning | 26.0 ms (25.7 to 26.3), plain "
        "| 25.0 ms (24.8 to 25.2), plain | 2.00x, 1.30x, 1.25x | 4.00 / 5.90 / 5.95 / 6.10 GB | 42 s / 9 s |"
    )
    assert low.startswith("| U-Net, low | 20.0 ms (19.8 to 20.2), auto | not measured | not measured | not measured |")
    assert low.endswith("| not measured |")
    starts["unet"]["mode"] = "graph"  # another mode's than the row's
    assert speed_table({"unet": problem}, starts).endswith("| 42 s / 9 s, graph |")


def test_a_case_is_compared_with_the_row_of_the_same_invocation() -> None:
    from readme_tables import speed_table

    low = {**unet_problem(), "rows": [row("halfstep", "auto", 22.0, 3.8)]}
    problems = {"unet": unet_problem(), "unet_low_memory": low | {"baseline": [row("halfstep", "auto", 19.5, 6.0)]}}
    assert "22.0 ms (21.8 to 22.2), auto; +12.8%, normal 19.5 ms |" in speed_table(problems, {})


def test_every_case_is_a_config_that_loads() -> None:
    from speed_cases import CASES, config_of

    for name, case in CASES.items():
        assert config_of(case).train.batch_size == case.batch_size, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "gpt9"], "there are unet, unet_low_memory, resnet50_64"),
        (["--modes", "graph,warp"], "--modes takes eager, compile, graph, auto, not 'graph,warp'"),
        (["--against", "plain:fast"], "peers are plain:tuned, "),
        (["--modes", ","], "--modes takes eager, compile, graph, auto, not ','"),
        (["train.fats=off"], "train.fats"),
    ],
)
def test_the_speed_script_says_what_it_takes_and_refuses_the_rest(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import speed

    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    with pytest.raises(SystemExit) as ended:
        speed.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_choices_made_on_a_busy_device_are_forgotten_and_older_ones_kept(tmp_path: Path) -> None:
    from speed_processes import forget_choices

    folder = tmp_path / "ab"
    folder.mkdir()
    older, newer, code = folder / "a.best_config", folder / "b.best_config", folder / "b.py"
    for path in (older, newer, code):
        path.touch()
    os.utime(older, (time.time() - 100,) * 2)
    forget_choices(tmp_path, began=time.time() - 50)
    assert sorted(path.name for path in folder.iterdir()) == ["a.best_config", "b.py"]


@pytest.mark.soak
def test_a_cache_that_was_filled_before_is_found_warm(
    filling: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from readme_tables import speed_table
    from speed import measured

    folder, said = filling
    assert "filled the cache of tiny plain documented" in said
    assert "could not fill the cache of tiny halfstep graph: HardwareError: halfstep graph fp32 cannot run" in said
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    tiny, hardware = tiny_case(against=("plain:documented",), precision="fp32"), probe("cpu")
    found = measured(tiny, ("eager",), hardware, deadline=None, baseline=tiny)
    assert [(row["name"], row["cache"]) for row in found["rows"]] == [("halfstep", ""), ("plain", "warm")]
    assert [row["name"] for row in found["baseline"]] == ["halfstep"]
    assert speed_table({"tiny": found}, {}).splitlines()[-1].startswith("| tiny | ")


@pytest.mark.soak
@pytest.mark.usefixtures("quick_compiler")
def test_a_first_start_ever_is_cold_and_the_next_one_warm() -> None:
    from speed_processes import starts

    found = starts(tiny_case(precision="fp32"), "compile", probe("cpu"))
    assert (found["cold"]["cache"], found["warm"]["cache"]) == ("cold", "warm")
    assert found["cold"]["s"] > found["warm"]["s"]


def seat(target: Any, *arguments: Any) -> Any:
    from speed_cases import request_of
    from speed_turns import Seat

    ours, its = FORKED.Pipe()
    process = FORKED.Process(target=target, args=(*arguments, its))
    process.start()
    its.close()
    request = request_of(tiny_case(against=("plain:tuned",)), ())
    return Seat(case="tiny", request=request, precision="bf16", process=process, line=ours)


def die(code: int, line: Any) -> None:
    os._exit(code)


def wait_for_nobody(line: Any) -> None:
    time.sleep(600)


@pytest.mark.slow  # two processes import torch
def test_a_row_whose_process_dies_says_so_and_one_that_takes_too_long_is_ended() -> None:
    dead, slow = seat(die, 3), seat(wait_for_nobody)
    dead.wait_until_ready(time.monotonic() + 60)
    slow.wait_until_ready(time.monotonic())
    rows = [each.timed(None) for each in (dead, slow)]
    assert [(row.label, row.reason) for row in rows] == [
        ("plain tuned bf16", "its process died with 3"),
        ("plain tuned bf16", "it was not compiled in time"),
    ]
    assert not slow.process.is_alive()


def test_the_device_is_left_while_code_is_compiled_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.callback import callback_handler

    from speed_turns import OneAtATime

    monkeypatch.setattr(callback_handler, "clear", callback_handler.clear)

    seen: list[bool] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        device.lend(False)  # as a kernel does that is done, while others of its graph are not
        seen.append(is_free())
        return graph

    def is_free() -> bool:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(other, fcntl.LOCK_UN)
        return True

    torch.compiler.reset()
    problem = build_problem(load_bench_config("unet", (), {"batch_size": 2}, small=True), torch.device("cpu"))
    with (tmp_path / "device").open("a") as file, (tmp_path / "device").open("a") as other:
        device = OneAtATime(file, torch.device("cpu"))
        device.lent_to(problem).make_model()
        torch.compiler.reset()  # as each trial of modes does
        torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
        assert (seen, is_free()) == ([True], False)
        device.leave()
        assert is_free()
        torch.compiler.reset()


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked off one that has imported torch, which takes each as long as all the rest."""
    monkeypatch.setattr("speed_turns.PROCESSES", FORKED)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_rows_start_together_and_are_timed_in_turn() -> None:
    from speed import measured_in_turn

    tiny = tiny_case(against=(), precision="fp32")
    [(name, found)] = measured_in_turn({"tiny": tiny}, ("eager", "auto"), probe("cpu"), None, at_once=2)
    eager, auto = found["rows"]
    assert (name, found["title"], found["warnings"]) == ("tiny", "tiny", [])
    assert [row["variant"] for row in found["rows"]] == ["eager", "auto"]
    assert auto["remarks"][0].startswith("eager: trials are for CUDA")
    assert eager["ms"] > 0
    assert auto["start_s"] > 0
    assert auto["loss"] == eager["loss"]


@pytest.mark.usefixtures("quick_processes")
def test_rows_without_time_are_left_out_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    from speed_turns import rows_in_turn

    tiny = tiny_case(against=(), precision="fp32")
    [(_, row)] = rows_in_turn({"tiny": tiny}, ("eager",), probe("cpu"), at_once=1, deadline=time.monotonic())
    assert (row.label, row.reason) == ("halfstep eager fp32", "it was not compiled in time")
    assert "tiny halfstep eager fp32: it was not compiled in time" in capsys.readouterr().out
