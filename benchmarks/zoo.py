"""Train many models with captured steps and compare each with fast="off": 30 deterministic steps per way, no timing.

    python benchmarks/zoo.py [--tier A] [--jobs 14] [--part 1/3] [--only NAMES] [--out DIR]   # `off` against `graph`
    python benchmarks/zoo.py --tier B                        # 40 of the models, also `compile` and `auto`
    python benchmarks/zoo.py --merge FILE...                 # add stored rows to benchmarks/results/zoo.json
    python benchmarks/zoo.py --summary [--write-docs]        # counts and tables; docs/captured_steps.md
    python benchmarks/zoo.py --device cpu --ways off --steps 2   # whether every model can be built and trained

The models are in zoo_models.py. Each trains in bf16 with fused AdamW and clipping at 1.0 (on a CPU in fp32, with the
tests' stand-in for replays). Worker processes take the models in turn; one that hangs or dies is replaced, and the
model's other ways run in the new one.

Weights, buffers, optimizer state, kept values and generators are compared after the last step:

    bit-equal              every byte equals that of fast="off", and steps were captured
    eager: REASON          nothing was captured, every byte equals that of fast="off", and one line said why
    up to rounding         captured and not bit-equal; the certificate says so
    within off's spread    two runs of fast="off" differ, too, by about as much
    within the bound       compiled code, which rounds differently; the loss is within the bound
    off raises, too        fast="off" raises the same
    DIFFERS, RAISED, STOPPED, HANG, CRASHED, SILENT   faults; SILENT: eager although captured steps were asked for, and
                           no line said why

The bound on the mean loss of the last ten steps: the largest distance between runs of fast="off" whose random numbers
differ, or, where no random numbers are drawn, the distance of fast="off" in bf16 from fp32. That is one distance
against another of the same kind, so compiled code beyond it is trained from seven more sets of weights and batches, and
the means of the distances and of the bounds over all eight are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "zoo.json"
LEARNING_RATE, NUM_BATCHES, NUM_LAST, NUM_STARTS = 1e-3, 4, 10, 8
STORE_EVERY_S, START_S = 15.0, 300.0
Store = Callable[[dict[str, Any]], None]
SPREAD = 3.0
"""How much further from fast="off" than its second run a captured run may end, where those two differ."""
CPU_ROUNDING = 1e-3
"""Relative bound on the loss on a CPU, where the run in fp32 has no counterpart."""
FAULTS = ("DIFFERS", "RAISED", "STOPPED", "HANG", "CRASHED", "SILENT")
TIER_B = [
    "tv_resnet18", "tv_vit", "tv_swin_v2", "tv_densenet", "tv_googlenet_main", "tv_retinanet", "tv_r3d_18", "hf_gpt2",
    "hf_llama", "hf_mixtral", "hf_bert", "hf_deberta_v2", "hf_t5", "hf_bart", "hf_whisper", "hf_wav2vec2",
    "hf_clip", "hf_mamba", "df_unet2d", "df_unet2d_condition", "df_vq_model", "df_dit", "timm_convnext", "timm_vit",
    "timm_mixer", "own_mlp", "own_lstm", "own_gnn", "own_vae", "own_nerf", "own_moe", "own_vq_vae", "own_pointnet",
    "own_dlrm", "own_annealed_weight", "own_label_smoothing", "own_numpy_temperature", "own_running_averages",
    "own_hidden_state", "own_checkpointed_batchnorm", "own_max_norm", "own_clamped", "own_dino", "own_lambda",
]  # fmt: skip


# --- a worker: it trains the models that it is given ---


def work(arguments: argparse.Namespace) -> None:
    """Train each model named on stdin with each of its ways; write one line of JSON per way to stdout."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # What the models print must not come between the lines of JSON.
    out, sys.stdout = sys.stdout, sys.stderr

    def report(**found: Any) -> None:
        print(json.dumps(found), file=out, flush=True)

    with contextlib.ExitStack() as stack:
        if arguments.device == "cpu":
            sys.path.append(str(HERE.parent / "tests" / "support"))
            from replay_stand_in import replays_on_cpu
            from torchvision_shim import define_missing_operators

            define_missing_operators()
            stack.enter_context(replays_on_cpu())
        if "auto" in arguments.ways:
            from halfstep.fast import fast_path as fast

            fast.LOOK_EVERY = 4  # let `auto` begin to compile early enough in a short run
        import halfstep  # noqa: F401, so that no model's time contains it

        report(ready=True)
        for line in sys.stdin:
            name, *ways = line.split()
            is_clean = Comparison(name, arguments, report).run(ways)
            report(name=name, done=True)
            if not is_clean:  # an exception may have left the device or the compiler in any state
                return
            torch._dynamo.reset()
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()


class Run:
    """One training run: losses, and everything that it has changed."""

    def __init__(
        self, name: str, way: str, num_steps: int, device: str, *, start: int = 0, seed: int = 0, precision: str = ""
    ) -> None:
        """Train; `start` gives the weights and batches, `seed` the random numbers that the model draws."""
        import torch
        from torch.utils._pytree import tree_map_only

        import halfstep as hs
        from zoo_models import MODELS

        self.losses: list[float] = []
        self.problem = self.kind = self.mode = self.certificate = ""
        self.state: dict[str, Any] = {}
        said = io.StringIO()
        torch.manual_seed(start)
        model, loss_fn, make_batch = MODELS[name].build()
        model.to(device).train()
        for key, value in list(model.__dict__.get("kept", {}).items()):
            model.kept[key] = value.to(device) if isinstance(value, torch.Tensor) else value
        torch.manual_seed(seed)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)
        precision = precision or ("bf16" if device == "cuda" else "fp32")
        with contextlib.redirect_stderr(said), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                step = hs.Step(model, optimizer, precision, fast=hs.Fast(way, num_steps=100_000), clip_norm=1.0)
                for number in range(num_steps):
                    with torch.random.fork_rng(devices=[]):
                        torch.default_generator.manual_seed(1000 * (start + 1) + number % NUM_BATCHES)
                        batch = make_batch(number)
                    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
                    self.losses.append(float(step(loss_fn, [batch]).loss))
                self.mode, self.certificate = step.mode, str(step.certificate)
            except Exception as error:
                self.kind = "STOPPED" if isinstance(error, hs.TrainingStopped) else "RAISED"
                self.problem = f"{type(error).__name__}: {shorten(str(error))}"
                self.trace = traceback.format_exc()[-3000:]
        self.lines = [line.strip() for line in said.getvalue().splitlines() if line.startswith("halfstep:")]
        self.warnings = sorted({shorten(str(one.message)) for one in warned if "halfstep" in one.filename})
        tensors = {
            **dict(model.named_parameters()), **dict(model.named_buffers()), **model.__dict__.get("kept", {}),
            **{f"{key}.{i}": value for i, p in enumerate(trained) for key, value in optimizer.state.get(p, {}).items()},
            "the CPU's generator": torch.get_rng_state(),
        }  # fmt: skip
        if device == "cuda":
            tensors["the GPU's generator"] = torch.cuda.get_rng_state()
        for key, value in tensors.items():
            self.state[key] = torch.as_tensor(value).detach().to("cpu", copy=True)

    @property
    def mean_loss(self) -> float:
        return statistics.mean(self.losses[-NUM_LAST:])


class Comparison:
    """Compare the ways of training one model with fast="off"."""

    def __init__(self, name: str, arguments: argparse.Namespace, report: Any) -> None:
        self.name, self.num_steps, self.device, self.report = name, arguments.steps, arguments.device, report
        self.limit_s = arguments.limit
        self.other_runs: dict[int, list[Run]] = {}

    def train(self, way: str, **options: Any) -> Run:
        return Run(self.name, way, self.num_steps, self.device, **options)

    def run(self, ways: list[str]) -> bool:
        """Report each way; return False if anything was raised."""
        self.begin("off")
        try:
            off = self.train("off")
        except ImportError as error:
            self.report(name=self.name, way="off", verdict=f"not installed: {error}")
            return True
        except Exception as error:  # the model cannot even be built
            text = f"{type(error).__name__}: {shorten(str(error))}"
            self.report(
                name=self.name, way="off", verdict="off raises", problem=text, trace=traceback.format_exc()[-2000:]
            )
            return False
        again = self.train("off") if ways else off
        found = (
            {"repeats": find_differences(off, again)["is_equal"], "losses": [off.losses[i] for i in (0, -1)]}
            if off.losses
            else {}
        )
        verdict = "off raises" if off.problem else "trained"
        self.report(name=self.name, way="off", verdict=verdict, problem=off.problem, warnings=off.warnings, **found)
        is_clean = not off.problem
        for way in ways:
            self.begin(way)
            run = self.train(way)
            self.report(name=self.name, way=way, **self.judge(way, off, again, run))
            is_clean = is_clean and not run.problem
        return is_clean

    def begin(self, way: str) -> None:
        self.report(name=self.name, begins=way)
        faulthandler.dump_traceback_later(max(1, self.limit_s - 5), file=sys.__stderr__)

    def judge(self, way: str, off: Run, again: Run, run: Run) -> dict[str, Any]:
        found: dict[str, Any] = {
            "mode": run.mode, "certificate": run.certificate, "lines": run.lines, "warnings": run.warnings,
            "problem": run.problem,
        }  # fmt: skip
        if run.problem:
            is_same = run.problem.split(":")[0] == off.problem.split(":")[0]
            return {**found, "trace": run.trace, "verdict": "off raises, too" if is_same else run.kind}
        differences = find_differences(off, run)
        found |= differences
        is_eager = run.mode == "eager"
        reasons = [line.split(": ", 1)[1] for line in run.lines if "eagerly" in line]
        if differences["is_equal"]:
            captured = "bit-equal" if not is_eager else f"eager: {reasons[-1]}" if reasons else "SILENT"
            return {**found, "verdict": captured}
        spread = find_differences(off, again)
        if not spread["is_equal"]:
            found["spread"] = spread["largest"]
            if is_eager or differences["largest"] <= SPREAD * spread["largest"]:
                return {**found, "verdict": "within off's spread"}
        was_compiled = any("compiled steps have shown" in line for line in run.lines)  # a few, which were slower
        if is_eager and not was_compiled:
            return {**found, "verdict": "DIFFERS"}
        distance, bound, is_random = self.measure_distance(off, run)
        found |= {"distance": distance, "bound": bound, "is_random": is_random}
        if "compile" in run.mode or was_compiled:
            if distance > bound:
                pairs = [(distance, bound), *(self.measure_start(way, start) for start in range(1, NUM_STARTS))]
                distance, bound = (statistics.fmean(values) for values in zip(*pairs, strict=True))
                found |= {"starts": pairs, "mean_distance": distance, "mean_bound": bound}
            return {**found, "verdict": "within the bound" if distance <= bound else "DIFFERS"}
        # Of torch's own kernels the certificate says what to expect; the loss is stored next to it.
        is_certified = re.search("rounding|noise|last bits", run.certificate) is not None
        return {**found, "verdict": "up to rounding" if is_certified else "DIFFERS"}

    def measure_start(self, way: str, start: int) -> tuple[float, float]:
        """Return the distance and its bound for other weights and batches."""
        self.begin(way)
        distance, bound, _ = self.measure_distance(self.train("off", start=start), self.train(way, start=start), start)
        return distance, bound

    def measure_distance(self, off: Run, run: Run, start: int = 0) -> tuple[float, float, bool]:
        """Return how far the mean loss is from that of `off`, its bound, and whether the model draws random numbers."""
        if start not in self.other_runs:
            options: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"precision": "fp32"}]
            self.other_runs[start] = [self.train("off", start=start, **one) for one in options]
        *seeds, exact = self.other_runs[start]
        is_random = seeds[0].losses != off.losses
        others = seeds if is_random else [exact]
        bound = max(abs(one.mean_loss - two.mean_loss) for one in others for two in (off, *others))
        if self.device == "cpu" and not is_random:  # fp32 either way
            bound = CPU_ROUNDING * abs(off.mean_loss)
        return abs(run.mean_loss - off.mean_loss), bound, is_random


def find_differences(one: Run, other: Run) -> dict[str, Any]:
    """Return whether two runs ended with the same bytes, how far apart, and which step's loss differs first."""
    import torch

    def read_bytes(tensor: Any) -> Any:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    largest, where = 0.0, []
    for name in sorted({*one.state, *other.state}):
        a, b = one.state.get(name), other.state.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            where.append(name)
            largest = float("inf")
        elif not torch.equal(read_bytes(a), read_bytes(b)):
            where.append(name)
            if a.is_floating_point():
                apart = float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-12))
                largest = max(largest, apart if apart == apart else float("inf"))
    pairs = list(zip(one.losses, other.losses, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b and (a == a or b == b)), None)
    is_equal = not where and first is None and len(one.losses) == len(other.losses)
    return {"is_equal": is_equal, "largest": largest, "first_step": first, "differing": where[:3]}


def shorten(text: str) -> str:
    return " ".join(text.split())[:400]


# --- the process that starts the workers ---


class Parent:
    """Hand models to workers, replace those that hang or die, and keep the rows."""

    def __init__(self, arguments: argparse.Namespace, tasks: list[tuple[str, list[str]]], store: Store) -> None:
        from zoo_models import MODELS

        self.arguments, self.packages = arguments, {name: case.package for name, case in MODELS.items()}
        self.tasks: queue.Queue[tuple[str, list[str]]] = queue.Queue()
        for task in tasks:
            self.tasks.put(task)
        self.store, self.stored_at = store, time.monotonic()
        self.ends_at = self.stored_at + arguments.budget
        self.rows: dict[str, Any] = {}
        self.lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        threads = [threading.Thread(target=self.serve) for _ in range(self.arguments.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.rows

    def serve(self) -> None:
        """Keep one worker busy until there are no more tasks."""
        worker: Worker | None = None
        while True:
            try:
                name, ways = self.tasks.get_nowait()
            except queue.Empty:
                break
            if time.monotonic() > self.ends_at:
                print(f"{name}: not tried, the budget is spent", flush=True)
                continue
            worker = worker if worker is not None and worker.is_alive else Worker(self.arguments)
            began = time.monotonic()
            way, done = "off", []
            worker.send(name, ways)
            while True:
                found = worker.read()
                if found is None:
                    verdict = "HANG" if worker.is_late else "CRASHED"
                    self.keep(name, way, {"verdict": verdict, "problem": worker.read_tail()})
                    left = [one for one in ways if one not in (*done, way)]
                    if left and way != "off":
                        self.tasks.put((name, left))
                    break
                if found.get("done"):
                    break
                way = found.get("begins", way)
                if "verdict" in found:
                    done.append(way)
                    self.keep(name, way, {key: value for key, value in found.items() if key not in ("name", "way")})
            with self.lock:
                seconds = self.rows[name].get("seconds", 0) + time.monotonic() - began
                self.rows[name]["seconds"] = round(seconds, 1)
                if time.monotonic() > self.stored_at + STORE_EVERY_S:  # whatever ends the call, these rows are kept
                    self.stored_at = time.monotonic()
                    self.store(self.rows)
        if worker is not None:
            worker.end()

    def keep(self, name: str, way: str, found: dict[str, Any]) -> None:
        with self.lock:
            row = self.rows.setdefault(name, {"package": self.packages[name], "ways": {}})
            found = {key: value for key, value in found.items() if value not in ("", [], None)}
            row["ways"][way] = found
            detail = found.get("problem") or found.get("certificate", "")
            if way != "off" or found["verdict"] != "trained":
                print(f"{name:28s}{way:8s}{found['verdict'][:150]} | {detail[:200]}", flush=True)


class Worker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.limit_s, self.is_late = START_S, False
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, read when the worker has died
        self.cache = tempfile.TemporaryDirectory()
        keywords = [f"--{name}={getattr(arguments, name)}" for name in ("device", "steps", "limit", "ways")]
        environment = {
            "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2", "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error", **os.environ, "XDG_CACHE_HOME": self.cache.name,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", *keywords],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment,
        )  # fmt: skip

        self.read()  # once it is ready
        self.limit_s = arguments.limit

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None and not self.has_failed

    has_failed = False

    def send(self, name: str, ways: list[str]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(" ".join((name, *ways)) + "\n")
            self.process.stdin.flush()

    def read(self) -> dict[str, Any] | None:
        """Return the next line, or None once the worker has died or taken too long for one."""
        assert self.process.stdout is not None
        timer = threading.Timer(self.limit_s, self.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.has_failed = True
            self.process.wait()
            return None
        found: dict[str, Any] = json.loads(line)
        is_bad = found.get("problem") or found.get("verdict", "").startswith("off raises")
        self.has_failed = self.has_failed or bool(is_bad)  # it ends by itself after this model
        return found

    def kill(self) -> None:
        self.is_late = True
        self.process.kill()

    def read_tail(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-2500:]

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


# --- rows of several calls in one file ---


def read_rows(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["models"] if path.exists() else {}


def merge(rows: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return all rows; of a model in both, the ways of `more` replace those of the same name."""
    merged = dict(rows)
    for name, row in more.items():
        before = merged.get(name, {"ways": {}})
        merged[name] = {**before, **row, "ways": {**before["ways"], **row["ways"]}}
    return dict(sorted(merged.items()))


def store_rows(rows: dict[str, Any], folder: str | None, facts: dict[str, Any]) -> None:
    path = Path(folder) / "zoo.json" if folder else RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"benchmark": "zoo", **facts, "models": rows}, indent=1).replace(f"{HERE.parent}/", "")
    # Errors name files of the machine.
    path.write_text(re.sub(r"/[\w./+-]*/(?:site-packages|dist-packages|python3\.\d+)/", "", text) + "\n")


def describe_machine(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from recording import device_name

    versions = {}
    for package in ("torch", "torchvision", "transformers", "diffusers", "timm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": "python benchmarks/zoo.py", "date": time.strftime("%Y-%m-%d"),
        "device": device_name(torch.device(arguments.device)), "steps": arguments.steps, "versions": versions,
    }  # fmt: skip


# --- tables ---

PACKAGES = {**{name: name for name in ("torchvision", "transformers", "diffusers", "timm")}, "own": "written here"}
KINDS = {
    "bit-equal": "bit-equal", "up to rounding": "up to rounding", "within": "within the bound or off's spread",
    "eager": "eager, bit-equal", "off raises": "off raises, too", "not installed": "not installed", "fault": "faults",
}  # fmt: skip


def classify(verdict: str) -> str:
    if verdict in FAULTS:
        return "fault"
    return next((kind for kind in KINDS if verdict.startswith(kind)), "fault")


def list_verdicts(rows: dict[str, Any], way: str) -> dict[str, str]:
    """Return the verdict of each model that was tried in this way."""
    found = {}
    for name, row in rows.items():
        missing = row["ways"].get("off", {}).get("verdict", "")
        if way in row["ways"]:
            found[name] = row["ways"][way]["verdict"]
        elif missing.startswith(("not installed", "off raises", "HANG", "CRASHED")) and way == "graph":
            found[name] = missing
    return found


def make_table(rows: dict[str, Any]) -> str:
    """Return counts of verdicts: one line per way, and for `graph` one per package."""
    lines = ["| | models | " + " | ".join(KINDS.values()) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for way in ("graph", "compile", "auto"):
        verdicts = list_verdicts(rows, way)
        groups = {f'`fast="{way}"`': list(verdicts)}
        if way == "graph":
            groups |= {title: [n for n in verdicts if rows[n]["package"] == key] for key, title in PACKAGES.items()}
        for title, names in groups.items():
            counts = Counter(classify(verdicts[name]) for name in names)
            if names:
                lines.append(
                    f"| {title} | {len(names)} | " + " | ".join(str(counts[kind] or "") for kind in KINDS) + " |"
                )
    return "\n".join(lines)


def make_summary() -> str:
    """Return what docs/captured_steps.md shows."""
    if not RESULT.exists():
        return "The models are not tried yet: `python benchmarks/zoo.py` does it."
    stored = json.loads(RESULT.read_text())
    rows, versions = stored["models"], ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    commits = sorted({row.get("commit", "unknown") for row in rows.values()})
    lines = [
        f"{len(rows)} models, {stored['steps']} deterministic steps each, compared with `fast=\"off\"` on one "
        f"{stored['device']}, {versions}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)} "
        "(`python benchmarks/zoo.py` and `--tier B`; every row in `benchmarks/results/zoo.json`):",
        "", make_table(rows), "",
    ]  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for name, verdict in list_verdicts(rows, "graph").items():
        kind = classify(verdict)
        if kind in ("eager", "up to rounding", "within", "off raises", "not installed", "fault"):
            title = verdict if kind != "eager" else "eager: " + shorten_reason(verdict)
            reasons.setdefault(title, []).append(name)
    lines += [f"- {title}: {', '.join(names)}" for title, names in sorted(reasons.items())]
    return "\n".join(lines)


def shorten_reason(verdict: str) -> str:
    """Return the reason without names of this model's modules, so that equal causes are shown together."""
    reason = re.sub(r"^eager: (runs eagerly, not captured: |runs eagerly: )?", "", verdict)
    return re.sub(r"\s*\(?('[^']*'(, )?)+\)?|\(.*?\)|/\S+", "", reason)[:110].strip().rstrip(":,")


def show_faults(rows: dict[str, Any]) -> None:
    for way in ("graph", "compile", "auto"):
        for name, verdict in list_verdicts(rows, way).items():
            if classify(verdict) == "fault":
                row = rows[name]["ways"].get(way, {})
                keys = ("mode", "problem", "largest", "first_step", "differing", "distance", "bound", "certificate")
                print(f"{way:8s}{name:28s}{verdict}", {key: row[key] for key in keys if key in row})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("A", "B"), default="A")
    parser.add_argument("--ways", help="of graph, compile and auto, with commas; `off` alone trains without comparing")
    parser.add_argument("--only", help="names of models, with commas; a name ending in * stands for all that begin so")
    parser.add_argument("--part", default="1/1", help="such as 2/3: the second third of the models")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one way of one model")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further model is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", default="unknown", help="the commit to name in the rows")
    parser.add_argument("--out", help="folder for zoo.json, default benchmarks/results")
    parser.add_argument("--merge", nargs="+", type=Path, help="files with rows to add to the stored ones")
    parser.add_argument("--summary", action="store_true", help="print the tables of the stored rows")
    parser.add_argument("--write-docs", action="store_true", help="with --summary: put them into the docs")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.ways = arguments.ways or ("graph" if arguments.tier == "A" else "graph,compile,auto")
    sys.path[:0] = [str(HERE), *map(str, HERE.parent.glob("packages/*/src"))]
    if arguments.work:
        work(arguments)
    elif arguments.merge:
        files = [json.loads(path.read_text()) for path in arguments.merge]
        rows = read_rows(RESULT)
        for one in files:
            rows = merge(rows, one["models"])
        store_rows(
            rows, arguments.out, {key: value for key, value in files[-1].items() if key not in ("benchmark", "models")}
        )
    elif arguments.summary:
        print(make_summary())
        show_faults(read_rows(RESULT))
        if arguments.write_docs:
            from readme_tables import CAPTURED, with_tables

            CAPTURED.write_text(with_tables(CAPTURED))
    else:
        run_models(arguments)


def run_models(arguments: argparse.Namespace) -> None:
    from zoo_models import MODELS

    stored = read_rows(RESULT)
    asked = arguments.only.split(",") if arguments.only else list(MODELS) if arguments.tier == "A" else TIER_B
    names = [
        name for name in MODELS if any(name == one or one.endswith("*") and name.startswith(one[:-1]) for one in asked)
    ]
    if unknown := [one for one in asked if not one.endswith("*") and one not in MODELS]:
        sys.exit(f"unknown models: {', '.join(unknown)}")
    part, num_parts = map(int, arguments.part.split("/"))
    names = names[part - 1 :: num_parts]
    # The longest first, as far as is known, so that no worker is left with one at the end.
    names.sort(key=lambda name: -stored.get(name, {}).get("seconds", 15))
    ways = [way for way in arguments.ways.split(",") if way != "off"]
    began = time.monotonic()
    machine, commit = describe_machine(arguments), arguments.commit
    base = {} if arguments.device == "cpu" else stored

    def store(rows: dict[str, Any]) -> None:
        if arguments.out or arguments.device == "cuda":
            rows = {name: {**row, "commit": commit} for name, row in rows.items()}
            store_rows(merge(base, rows), arguments.out, machine)

    rows = Parent(arguments, [(name, ways) for name in names], store).run()
    verdicts = Counter(classify(v) for way in ways for v in list_verdicts(rows, way).values())
    print(f"{len(rows)} models in {time.monotonic() - began:.0f} s: {dict(verdicts)}")
    show_faults(rows)
    store(rows)


if __name__ == "__main__":
    main()
