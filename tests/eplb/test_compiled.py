"""Compiled kernels come from disk, and an edit in a helper is noticed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

EPLB = Path(__file__).parents[2] / "eplb"
PROGRAM = """
import json, time
from evenroute.eplb.planner.kernels.pack import swap_refine
import numpy as np
slots = np.array([0, 1, 2, 3], dtype=np.int32)
load = np.array([4.0, 3.0, 2.0, 1.0])
holds = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=np.bool_)
ranks = np.array([7.0, 3.0])
done = swap_refine(2, slots, load, np.zeros(4, dtype=np.int8), holds, ranks, 10)
print(done, slots.tolist(), sum(swap_refine.stats.cache_hits.values()))
"""


def run(tree: Path, cache: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=env,
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def test_an_edited_helper_is_compiled_again(tmp_path: Path) -> None:
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    copy = tree / "evenroute" / "eplb"
    copy.parent.mkdir(parents=True)
    shutil.copytree(EPLB, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EPLB.parent / "evenroute/__init__.py", copy.parent)  # else the installed package is found
    source = (copy / "planner/kernels/pack.py").read_text()
    head, body = source.split("@kernel\ndef swap_refine", 1)
    # A kernel in a file of its own that another file's kernel calls: the case numba's cache misses.
    (copy / "planner/kernels/helper.py").write_text(
        "from evenroute.eplb._compiled import kernel\n\n\n@kernel\ndef limit(n):\n    return n\n"
    )
    body = body.replace("for done in range(max_swaps):", "for done in range(limit(max_swaps)):", 1)
    head = head.replace(
        "import numpy as np\n",
        "import numpy as np\nfrom evenroute.eplb.planner.kernels.helper import limit\n",
        1,
    )
    (copy / "planner/kernels/pack.py").write_text(head + "@kernel\ndef swap_refine" + body)

    first = run(tree, cache)
    assert first.endswith("] 0")
    assert "[0, 1, 2, 3]" not in first
    assert run(tree, cache) == first.removesuffix("0") + "1", (
        "the second process must take the code from disk"
    )
    helper = copy / "planner/kernels/helper.py"
    stamp = helper.stat()
    helper.write_text(helper.read_text().replace("return n\n", "return 0\n"))
    os.utime(helper, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert "[0, 1, 2, 3] 0" in run(tree, cache), "the edited helper allows no swap any more"
