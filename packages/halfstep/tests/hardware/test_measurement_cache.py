"""Measurements are kept per device, driver and torch version; a broken cache never breaks detect."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fake_driver import T4, TINY, FakeDriver
from halfstep.hardware.cache import make_cache_key, measure_once
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe


class Counter:
    """Measures on a fake T4 and counts how often."""

    def __init__(self) -> None:
        self.driver, self.count = FakeDriver(T4, speedups={"fp16": 5.0}), 0

    def __call__(self, hardware: Hardware) -> Hardware:
        self.count += 1
        return measure(hardware, sizes=TINY, driver=self.driver)


@pytest.fixture
def t4() -> Hardware:
    return probe(driver=FakeDriver(T4))


def test_the_second_time_nothing_is_measured(tmp_path: Path, t4: Hardware) -> None:
    counter = Counter()
    first = measure_once(t4, tmp_path, counter)
    again = measure_once(t4, tmp_path, counter)
    assert counter.count == 1
    assert again == first


def test_fresh_measures_again(tmp_path: Path, t4: Hardware) -> None:
    counter = Counter()
    measure_once(t4, tmp_path, counter)
    measure_once(t4, tmp_path, counter, fresh=True)
    assert counter.count == 2


def test_free_memory_is_that_of_now_and_not_of_the_cache(tmp_path: Path, t4: Hardware) -> None:
    measure_once(t4, tmp_path, Counter())
    fuller = dataclasses.replace(t4, memory_free_bytes=123)
    assert measure_once(fuller, tmp_path, Counter()).memory_free_bytes == 123


@pytest.mark.parametrize("field", ["name", "uuid", "driver", "torch_version"])
def test_another_device_driver_or_torch_has_another_file(t4: Hardware, field: str) -> None:
    assert make_cache_key(dataclasses.replace(t4, **{field: "other"})) != make_cache_key(t4)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"capability": [1]}', "null", "\x00\xff"])
def test_a_device_with_a_corrupt_file_is_measured_again(tmp_path: Path, t4: Hardware, content: str) -> None:
    counter = Counter()
    path = tmp_path / make_cache_key(t4)
    path.write_text(content)
    hardware = measure_once(t4, tmp_path, counter)
    assert counter.count == 1
    assert hardware.find_speedup("fp16") == pytest.approx(5.0)
    measure_once(t4, tmp_path, counter)
    assert counter.count == 1


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path: Path, t4: Hardware) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    hardware = measure_once(t4, in_the_way / "cache", Counter())
    assert hardware.measurements
    assert any("could not be stored" in note for note in hardware.notes)


def test_what_was_only_looked_at_is_not_stored(tmp_path: Path, t4: Hardware) -> None:
    busy = FakeDriver(T4, others="busy")
    measure_once(t4, tmp_path, lambda hardware: measure(hardware, driver=busy))
    assert list(tmp_path.iterdir()) == []
