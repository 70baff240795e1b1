"""Broken inputs, seeded: a clear message or a normal report, no traceback, bounded time and memory."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from halfstep_check.check import check

HERE = Path(__file__).parent
NUM_INPUTS, NUM_SOAKED = 55, 2000
"""Five of each mutation in `make test`; `make soak` tries them all."""
NESTED_IFS = "".join(" " * depth + "if a:\n" for depth in range(90))
SECONDS_EACH = 20.0
"""Far above the typical 5 ms and the 4 s of a file with 160 loops, far below forever: the machine may be busy."""


def originals() -> list[tuple[str, str]]:
    """(suffix, content) of real configs and scripts: the scenarios' files and the lint snippets."""
    scenarios = yaml.safe_load((HERE / "scenarios.yaml").read_text())
    found = [(Path(name).suffix, text) for s in scenarios for name, text in s.get("files", {}).items()]
    for path in sorted((HERE / "snippets").glob("*.txt")):
        sections = re.split(r"^=== .*\n", path.read_text(), flags=re.MULTILINE)
        found += [(".py", section) for section in sections if section]
    return found


def truncated(text: str, rng: random.Random) -> bytes:
    return text.encode()[: rng.randrange(len(text) + 1)]


def flipped(text: str, rng: random.Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def lines_shuffled(text: str, rng: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    rng.shuffle(lines)
    return "".join(lines).encode()


def lines_doubled(text: str, rng: random.Random) -> bytes:
    return "".join(line * rng.choice((1, 1, 2)) for line in text.splitlines(keepends=True)).encode()


def wrong_types(text: str, rng: random.Random) -> bytes:
    values = [
        "[1, 2]",
        "{a: b}",
        "null",
        "-1e400",
        "~",
        '""',
        "nan",
        "0x10",
        "'",
        "!!python/object:os.system {}",
        "9" * 5000,
    ]
    return re.sub(r"(?<=[:=] )[^\n,}]+", lambda m: rng.choice([m.group(), rng.choice(values)]), text).encode()


def words_swapped(text: str, rng: random.Random) -> bytes:
    words = re.findall(r"\w+", text) or ["x"]
    return re.sub(r"\w+", lambda m: rng.choice(words) if rng.random() < 0.15 else m.group(), text).encode()


def deeply_nested(text: str, rng: random.Random) -> bytes:
    depth = rng.choice((50, 500, 5000))
    opening = rng.choice(("[", "{a: ", "(", "- ", '{"a":', "not ", "-", "f("))
    return (text + "\n" + opening * depth + rng.choice(("", "1", "]" * depth, ")" * depth))).encode()


def yaml_bomb(text: str, rng: random.Random) -> bytes:
    levels = rng.choice((5, 9, 30))
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return (text + "\n" + "\n".join(lines)).encode()


def cyclic(text: str, rng: random.Random) -> bytes:
    return (
        rng.choice(("trainer: &t\n  precision: *t\n", "a: &a [*a]\n", "&a fp16: *a\n", "<<: *nothing\n")).encode()
        + text.encode()
    )


def binary(text: str, rng: random.Random) -> bytes:
    return rng.choice((b"\x00\x01\x02", b"\xff\xfe", b"\x80", b"\xef\xbb\xbf", b"\xc3")) + text.encode()


def huge(text: str, rng: random.Random) -> bytes:
    return (text + "\n").encode() * rng.choice((10, 40))


MUTATIONS: tuple[Callable[[str, random.Random], bytes], ...] = (
    *(truncated, flipped, lines_shuffled, lines_doubled, wrong_types, words_swapped),
    *(deeply_nested, yaml_bomb, cyclic, binary, huge),
)


@pytest.mark.parametrize("num_inputs", [NUM_INPUTS, pytest.param(NUM_SOAKED, marks=pytest.mark.soak)])
def test_mutated_inputs_give_a_message_and_never_a_traceback(num_inputs: int, tmp_path: Path) -> None:
    inputs = originals()
    for number in range(num_inputs):
        rng = random.Random(number)
        suffix, text = rng.choice(inputs)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        path = tmp_path / f"input{rng.choice((suffix, suffix, suffix, '.yaml', '.json', '.toml', '.py', '.sh'))}"
        path.write_bytes(mutate(text, rng))
        started = time.process_time()
        report = check([path])
        assert time.process_time() - started < SECONDS_EACH, (number, mutate.__name__)
        assert report.exit_code in (0, 1, 2)
        assert all(error.what for error in report.unreadable)


def test_a_yaml_bomb_stays_within_a_few_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_bytes(yaml_bomb("trainer: {precision: 16}", random.Random(1)).replace(b"x", b"y"))
    tracemalloc.start()
    report = check([path])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.exit_code == 2
    assert peak_bytes < 64 * 2**20


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("requirements.txt", "lightning" + " " * 190_000 + "x"),
        ("long.toml", 'x = """\n[a' + " " * 190_000 + '\n"""\n'),
        ("run.sh", "python train.py --bf16 " + "\\\n" * 60_000),
        ("quotes.sh", "python train.py --a='" * 10_000),
        ("deep.py", "x = " + "(" * 3000 + ")" * 3000),
        ("chain.py", "loss" + ".backward()" * 3000),
        ("conditions.py", NESTED_IFS + " " * 90 + "loss.backward()\n"),
    ],
)
def test_inputs_made_to_take_long_do_not(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    started = time.process_time()
    check([path])
    assert time.process_time() - started < SECONDS_EACH


def test_nothing_in_a_script_or_config_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / "train.py").write_text(f"open({str(marker)!r}, 'w').close()\nloss.backward()\n")
    (tmp_path / "a.yaml").write_text(f"trainer: {{precision: !!python/object/apply:os.system ['touch {marker}']}}\n")
    check([tmp_path / "train.py", tmp_path / "a.yaml"], project=tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"\n", b"# nothing\n", b"---\n", b"- 1\n- 2\n", b"just words", b"null"])
def test_empty_and_foreign_configs_say_nothing_and_are_no_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    report = check([path])
    assert report.exit_code == 0
    assert report.silent == (str(path),)
