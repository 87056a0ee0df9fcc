"""The plug-in's start in a real SGLang, without a model: hooks fit, and what changed ends the process by name.

`python sglang_start.py`: one line a case, as `CASE: STATUS: WHAT WAS SAID`.
"""

from __future__ import annotations

import contextlib
import io
import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("EVENROUTE_REBALANCER", "ipc:///tmp/nobody")

import sglang
import sglang.srt.managers.scheduler
from sglang.srt.layers.moe import topk
from sglang.srt.plugins.hook_registry import HookRegistry

from evenroute.dist.engines.sglang import seams


def start(case: str) -> None:
    said = io.StringIO()
    status = 0
    with contextlib.redirect_stderr(said):
        try:
            seams.register()
        except SystemExit as ended:
            status = ended.code
    lines = said.getvalue().splitlines() or [""]  # SGLang's own log comes before
    print(f"{case}: {status}: {lines[-1]}", flush=True)


if __name__ == "__main__":
    start("known")
    HookRegistry.apply_hooks()
    seams.require_hooks()
    print(f"hooked: {len(seams.SEAMS)}", flush=True)
    version, sglang.__version__ = sglang.__version__, "0.6.0"
    start("version")
    sglang.__version__ = version
    kept, topk.select_experts = topk.select_experts, lambda hidden_states, router_logits: None
    start("parameter")
    del topk.select_experts
    start("gone")
    topk.select_experts = kept
    del os.environ["EVENROUTE_REBALANCER"]
    os.environ["EVENROUTE_MODE"] = "shadow"
    start("setting")
