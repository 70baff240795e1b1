"""The line that says why a step is not compiled names the cause, not the compiler's stage."""

from __future__ import annotations

import subprocess

import pytest
import torch

from halfstep.tune.compiling import MOST_CHARACTERS, compile_reason


@torch.library.custom_op("halfstep_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operation_the_compiler_knows_nothing_of_is_named() -> None:
    torch.compiler.reset()
    with pytest.raises(Exception, match="fake") as failed:
        torch.compile(lambda x: twice(x) + 1, backend="eager")(torch.ones(2))
    reason = compile_reason(failed.value)
    assert "halfstep_tests::twice" in reason
    assert "\n" not in reason


def test_what_a_linker_said_is_found_below_its_command() -> None:
    text = """CppCompileError: C++ compile error

        Command:
        g++ x.cpp -o x.so

        Output:
        x.h:741:5: note: parameter passing changed in GCC 10.1
        /usr/bin/ld: final link failed: No space left on device
        collect2: error: ld returned 1 exit status"""
    error = RuntimeError(text)
    error.__cause__ = subprocess.CalledProcessError(1, ["g++", "x.cpp"])
    wanted = "CppCompileError: C++ compile error: /usr/bin/ld: final link failed: No space left on device"
    assert compile_reason(error) == wanted


def test_a_command_that_failed_is_not_repeated_and_an_error_alone_is_its_first_line() -> None:
    error = RuntimeError("Failed to find C compiler\nand pages more")
    error.__cause__ = subprocess.CalledProcessError(1, ["cc"])
    assert compile_reason(error) == "Failed to find C compiler"


def test_what_a_users_own_error_was_raised_beside_is_not_added() -> None:
    error = ValueError("no size was given")
    error.__context__ = KeyError("size")
    assert compile_reason(error) == "no size was given"


def test_the_line_has_an_end() -> None:
    assert len(compile_reason(RuntimeError("C++ error: " + "std::pair<" * 500))) < MOST_CHARACTERS + 10
