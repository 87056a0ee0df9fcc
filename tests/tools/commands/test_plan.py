"""`evenroute plan`."""

import json
import subprocess
import sys

import numpy as np
import pytest

from evenroute.eplb.placement.file import load_placement

LOADS = [[0, 0, 0, 0], [100, 10, 10, 10], [1, 2, 3, 4]]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Torch is blocked: planning must work without it.
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from evenroute.tools.cli import main; main(['plan', *sys.argv[1:]])"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def loads_file(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"logical_count": LOADS}))
    return path


def test_plan_writes_a_placement_and_one_json_object(loads_file, tmp_path) -> None:
    out = tmp_path / "placement.json"
    shape = ("--ep-size", "2", "--num-slots", "6", "--model", "m", "--phase", "decode")
    done = plan(str(loads_file), *shape, "-o", str(out), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    placement, content = load_placement(out)
    assert (content.model, content.phase) == ("m", "decode")
    assert facts["digest"] == placement.digest()
    assert facts["balancedness_predicted"]["per_layer"][0] is None
    assert facts["balancedness_predicted"]["mean"] >= facts["balancedness_before"]["mean"]
    again = plan(str(loads_file), "--ep-size", "2", "--num-slots", "6", "--current", str(out), "--json")
    assert json.loads(again.stdout)["moved_slots"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ep-size", "4", "--num-slots", "6"], "nearest valid num_slots: 8"),
        (["--ep-size", "2", "--num-slots", "6", "--policy", "magic"], "policy"),
        (["--ep-size", "2", "--num-slots", "6", "--num-groups", "5"], "num_groups"),
        (["--ep-size", "x", "--num-slots", "6"], "ep-size"),
        (["--num-slots", "6"], "ep-size"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(loads_file, arguments: list[str], words: str) -> None:
    done = plan(str(loads_file), *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_auto_from_a_placement_in_use_writes_shares_and_a_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    random = np.random.default_rng(0)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        path.write_text(json.dumps({"logical_count": random.lognormal(0, 1, (3, 32)).tolist()}))
    first, second, picture = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "curve.png"
    shape = ("--ep-size", "4", "--num-slots", "40")
    assert plan(str(old), *shape, "-o", str(first)).returncode == 0
    flags = ("--policy", "auto", "--current", str(first), "--max-moves", "6", "--png", str(picture))
    done = plan(str(new), *shape, *flags, "-o", str(second), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["policy"] == "weighted"
    assert facts["moved_slots"] <= 6
    assert facts["balancedness_predicted"]["mean"] > facts["balancedness_before"]["mean"]
    placement, _ = load_placement(second)
    assert (placement.shares is not None) == facts["uneven_shares"]
    assert facts["uneven_shares"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "curve.png",
        "first.json",
        "new.json",
        "old.json",
        "second.json",
    ]


def test_several_windows_and_what_they_must_share(loads_file, tmp_path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"logical_count": [[1, 2, 3, 4]]}))
    both = (str(loads_file), str(loads_file), "--ep-size", "2", "--num-slots", "6", "--windows", "robust")
    assert json.loads(plan(*both, "--json").stdout)["policy"] == "global"
    done = plan(str(loads_file), str(other), "--ep-size", "2", "--num-slots", "6")
    assert done.returncode == 2
    assert "other.json: [1, 4] (layers, experts)" in done.stderr


def test_unreadable_files_are_named(tmp_path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"logical_count": [[1, 2], [3]]}')
    for file in (path, tmp_path / "absent.json"):
        done = plan(str(file), "--ep-size", "2", "--num-slots", "2")
        assert done.returncode == 2
        assert file.name in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_of_another_form_is_planned_from(tmp_path) -> None:
    """The same loads as a plain array make the same plan as in SGLang's JSON."""
    loads = [[9, 1, 1, 1], [1, 1, 1, 5]]
    (tmp_path / "loads.json").write_text(json.dumps({"logical_count": loads}))
    np.save(tmp_path / "loads.npy", np.array(loads))
    flags = ("--ep-size", "2", "--num-slots", "6", "--json")
    digests = {
        json.loads(plan(str(tmp_path / name), *flags).stdout)["digest"]
        for name in ("loads.json", "loads.npy")
    }
    assert len(digests) == 1
