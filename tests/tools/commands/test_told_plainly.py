"""What a person is told: plain words for what a file is, whole helps, names in one line, no temporary names."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.decoding import LARGEST_SUM
from evenroute.eplb.loads.source import LoadWindow
from evenroute.tools.errors import target_name
from support.command import assert_one_line_error, evenroute
from support.fake_control import FakeControl, status

TEXT = "notes of the on-call: see the dashboard\n"


def loads_file(folder: Path, loads: object, name: str = "loads.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"logical_count": loads}))
    return path


# ------------------------------------------------------------------------------------- what a file is


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x.json", "JSON"),
        ("x.npy", "a numpy array"),
        ("x.npz", "a numpy archive"),
        ("x.pt", "a file of torch.save"),
        ("x.safetensors", "a safetensors file"),
        ("x.jsonl", "a router trace"),
        ("x.db", "evenroute store, dump or placement"),
        ("x.evd", "evenroute store, dump or placement"),
    ],
)
def test_plain_text_is_called_so(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).write_text(TEXT)
    outcome = evenroute("inspect", tmp_path / name)
    assert_one_line_error(outcome, name, "plain text that begins 'notes of the on-call", expected)
    assert "damaged" not in outcome.err
    assert "pickle" not in outcome.err


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_the_stump_of_a_binary_file_is_still_a_cut_off_one(tmp_path: Path, cut: int) -> None:
    np.savez(tmp_path / "x.npz", loads=np.ones((2, 2)))
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:cut])
    assert_one_line_error(evenroute("inspect", tmp_path / "x.npz"), "truncated or damaged")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"logical_count": [[1, NaN], [2, 3]]}', "logical_count[0][1] is nan"),
        ('{"logical_count": [[1, 2], [-Infinity, NaN]]}', "logical_count[1][0] is -inf"),
        ("[[1, 2], [3, Infinity]]", "[1][1] is inf"),
    ],
)
def test_json_with_nan_is_told_by_its_place(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "x.json").write_text(text)
    for command in (["inspect"], ["advise"], ["plan", "--ep-size", 2, "--num-slots", 2], ["replay"]):
        outcome = evenroute(command[0], tmp_path / "x.json", *command[1:])
        assert_one_line_error(outcome, "x.json", place, "finite numbers")


def test_json_that_ends_early_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"logical_count": [[1, NaN], [2,')
    assert_one_line_error(evenroute("inspect", tmp_path / "x.json"), "truncated or damaged")


class Foreign:
    """A class that a pickle may name; nothing of it is ever run."""


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("content", [{"logical_count": [[1]]}, Foreign()])
def test_a_pickle_named_pt_is_refused_in_one_line_and_nothing_else(
    tmp_path: Path, protocol: int, content: object
) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps(content, protocol))
    outcome = evenroute("inspect", tmp_path / "x.pt")  # a warning of torch's would fail the test
    assert_one_line_error(
        outcome, f"x.pt: a pickle (protocol {protocol}), which is never executed", "torch.save"
    )


def test_torchs_own_warnings_are_not_shown(tmp_path: Path) -> None:
    """Protocol 2 is what torch's older files begin with, so torch is asked, and has advice for their writers."""
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Foreign(), 2))
    command = [sys.executable, "-W", "always", "-m", "evenroute.tools.cli", "inspect", str(tmp_path / "x.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("loads", [[[1, 2], [1e308, 1e308]], [[0, 1], [1e31, 0]]])
@pytest.mark.parametrize(
    "command",
    [["inspect"], ["inspect", "--json"], ["advise"], ["plan", "--ep-size", 2, "--num-slots", 2], ["replay"]],
)
def test_loads_whose_sums_overflow_are_refused_with_their_layer(
    tmp_path: Path, loads: list[list[float]], command: list[object]
) -> None:
    path = loads_file(tmp_path, loads)
    assert_one_line_error(evenroute(command[0], path, *command[1:]), str(path), "layer 1 sums to", "1e+30")


def test_the_largest_allowed_loads_give_finite_figures(tmp_path: Path) -> None:
    path = loads_file(tmp_path, [[LARGEST_SUM / 4, LARGEST_SUM / 2], [LARGEST_SUM / 2, LARGEST_SUM / 4]])
    facts = evenroute("inspect", path, "--ep-size", 2, "--json").json["sources"][0]
    assert facts["balancedness"]["mean"] == pytest.approx(0.75)
    assert facts["balancedness"]["total"] == pytest.approx(0.75)
    assert np.isfinite(float(facts["routed"]))


def test_sums_of_ranks_that_overflow_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        header = DumpHeader(num_layers=2, num_logical_experts=2, mode="per_pass", scope="rank", rank=rank)
        with DumpWriter(tmp_path / f"{rank}.evd", header) as writer:
            writer.add_window(LoadWindow(np.array([[1, 1 + rank], [0, 2**62]]), first_step=0, last_step=0))
    assert_one_line_error(evenroute("inspect", tmp_path), "layer 1 add up to more than")


# --------------------------------------------------------------------------------- names of outputs


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "LOADS", "OUT", "--to", "evenroute"],
        ["convert", "LOADS", "OUT", "--to", "sglang"],
        ["plan", "LOADS", "--ep-size", 2, "--num-slots", 4, "-o", "OUT"],
        ["plan", "LOADS", "--ep-size", 2, "--num-slots", 4, "--png", "OUT"],
        ["inspect", "LOADS", "--html", "OUT"],
        ["inspect", "LOADS", "--png", "OUT"],
        ["record", "dump", "ipc:///nowhere/x.sock", "-o", "OUT"],
    ],
)
def test_a_missing_output_folder_is_named_and_no_temporary_file(tmp_path: Path, words: list[object]) -> None:
    loads = loads_file(tmp_path, [[1, 2], [3, 4]])
    for out in (tmp_path / "none" / "x.out", tmp_path):
        outcome = evenroute(*[{"LOADS": loads, "OUT": out}.get(str(word), word) for word in words])
        what = "is a folder" if out is tmp_path else f"folder {tmp_path / 'none'} does not exist"
        assert_one_line_error(outcome, str(out), what)
        assert "partial" not in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loads.json"]


def test_hidden_names_become_their_targets() -> None:
    for hidden in (".o.evd.24213-7f939077f990.partial", ".o.evd.8n_a4o_x", ".o.evd.partial"):
        assert target_name(f"/a/{hidden}") == "/a/o.evd"
        assert target_name(hidden) == "o.evd"
    for plain in ("/a/o.evd", ".profile", "/a/.hidden.json", "x.partial"):
        assert target_name(plain) == plain


# ----------------------------------------------------------------------------------- helps and hints


def test_no_help_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, said in ((["--help"], "with the reasons as numbers"), (["record", "--help"], "recording")):
        listed = evenroute(*words).out.partition("Options:")[2]
        assert "..." not in listed
        assert said in " ".join(listed.split())


def test_no_answer_says_what_is_missing(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/none.sock"
    for command in (["status"], ["top"], ["record", "stop"], ["record", "start"]):
        outcome = evenroute(*command, address, "--timeout", 0.2)
        assert_one_line_error(outcome, "no answer within 0.2 s", f"there is no socket {tmp_path}/none.sock")


ODD = " dsv3\n\x1b[31m [/red] [bold]x\u200b  y "
CLEAN = r"dsv3 \x1b[31m [/red] [bold]x\u200b y"


def test_names_of_others_are_shown_in_one_line(tmp_path: Path) -> None:
    odd = status(2, model=ODD, store=f"{ODD}.db", degraded=[f"why {ODD}"], address=ODD, last_plan_error=ODD)
    with FakeControl(tmp_path, [odd]) as fake:
        shown = evenroute("status", fake.address)
        live = evenroute("top", fake.address, "--frames", 1)
    assert shown.status == live.status == 1
    for text in (shown.out, live.out):
        assert "\x1b" not in text
        assert "\u200b" not in text
        assert CLEAN in text
    clean = status(2, degraded=["why"], last_plan_error="x")
    with FakeControl(tmp_path, [clean]) as fake:
        assert len(shown.out.splitlines()) == len(evenroute("status", fake.address).out.splitlines())
    assert f"  ! why {CLEAN}" in shown.out.splitlines()


def test_names_in_files_are_shown_in_one_line(tmp_path: Path) -> None:
    header = DumpHeader(num_layers=1, num_logical_experts=2, model=ODD, phase=ODD, notes=[ODD])
    with DumpWriter(tmp_path / "x.evd", header) as writer:
        writer.add_window(LoadWindow(np.array([[1, 2]])))
    outcome = evenroute("inspect", tmp_path / "x.evd")
    assert outcome.status == 0
    assert f"note   {CLEAN}" in " ".join(outcome.out.split("  ")) or CLEAN in outcome.out
    assert "\x1b" not in outcome.out


# ---------------------------------------------------------------------------------------- plan slots


def test_plan_slots_shows_the_plan_in_text_and_json(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = loads_file(tmp_path, rng.zipf(1.6, (3, 16)).clip(max=1000).tolist())
    facts = evenroute("inspect", path, "--ep-size", 4, "--plan-slots", 20, "--json").json["sources"][0]
    plan = facts["plan"]
    made = evenroute("plan", path, "--ep-size", 4, "--num-slots", 20, "--json").json
    assert plan["num_slots"] == 20
    assert plan["balancedness"]["mean"] == pytest.approx(made["balancedness_predicted"]["mean"], abs=0.05)
    assert plan["balancedness"]["mean"] > facts["balancedness"]["mean"]
    text = evenroute("inspect", path, "--ep-size", 4, "--plan-slots", 20).out
    assert "With a plan for 20 slots" in text
    assert f"mean over layers {plan['balancedness']['mean']:.4f}" in text
    assert f"{plan['moves']:,} moves" in text
    (tmp_path / "more").mkdir()
    for name in ("a.json", "b.json"):
        (tmp_path / "more" / name).write_bytes(path.read_bytes())
    text = evenroute("inspect", tmp_path / "more", "--ep-size", 4, "--plan-slots", 20).out
    assert " ".join(text.split()).count("plan for 20 slots") == 2
    assert_one_line_error(
        evenroute("inspect", path, path, "--diff", "--plan-slots", 20), "--plan-slots", "--diff"
    )
    assert_one_line_error(evenroute("inspect", path, "--ep-size", 4, "--plan-slots", 21), "21")
