"""A command that compiles says so, once; one that finds compiled code says nothing."""

import numba
import pytest

from evenroute.tools.compiling import says_compiling


def test_the_first_compilation_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    function = numba.njit(lambda value: value + 1)
    with says_compiling():
        assert function(1) == 2
        assert function(1.5) == 2.5
    assert capsys.readouterr().err.count("compiling the planner") == 1
    with says_compiling():
        assert function(2) == 3
    assert capsys.readouterr().err == ""
