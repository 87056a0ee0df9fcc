"""Seams of an engine are found in its sources, and any change of one has a name."""

from __future__ import annotations

import pytest

from evenroute.dist.engines.seams import Seam, find_seams, seam_problem, text_digest

SOURCE = """
class State:
    rows: int
    columns: int = 3

    def step(self, dummy, *, log=False):
        # why
        self.rows += 1


def group(): return None
"""
STEP = text_digest("def step(self, dummy, *, log=False):\n self.rows += 1")
SEAMS = (
    Seam("state.py", "State", needs=("rows", "columns")),
    Seam("state.py", "State.step", (("self", "dummy", "*", "log"),), texts=(STEP,)),
    Seam("state.py", "group", ((),)),
)


def problems(source: str | None, seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    found = find_seams(seams, lambda file: source if file == "state.py" else None)
    return [problem for problem in (seam_problem(seam, one) for seam, one in found.items()) if problem]


def test_sources_as_known_are_silent_and_layout_is_no_text() -> None:
    assert problems(SOURCE) == []
    assert problems(SOURCE.replace("# why", "# because\n\n")) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("step(", "advance(", "state.State.step is missing"),
        (
            "dummy,",
            "dummy, more,",
            "state.State.step has parameters (self, dummy, more, *, log), known: (self, dummy, *",
        ),
        ("rows += 1", "rows += 2", "state.State.step has a text that is not known"),
        ("    columns: int = 3\n", "", "state.State lacks columns"),
        ("class State", "class Other", "state.State is missing"),
        ("def group()", "def group(name)", "state.group has parameters (name), known: ()"),
    ],
)
def test_an_edit_is_told_by_name(old: str, new: str, words: str) -> None:
    assert old in SOURCE
    assert any(words in problem for problem in problems(SOURCE.replace(old, new)))


def test_a_file_that_is_gone() -> None:
    assert problems(None) == [f"state.{name} is missing" for name in ("State", "State.step", "group")]


def test_what_is_called_through_may_change_inside() -> None:
    seam = Seam("state.py", "State.step", needs=("self", "dummy"))
    assert problems(SOURCE.replace("rows += 1", "rows += 2").replace("dummy,", "dummy, more,"), (seam,)) == []
    assert problems(SOURCE.replace("dummy,", "drill,"), (seam,)) == ["state.State.step lacks dummy"]
