"""An engine of vLLM's on the CPU in a process of its own: rounds of the same greedy prompts until it is told to stop.

python -m support.vllm_engine.serve FOLDER '{"model": ..., "tensor_parallel_size": 2, ...}'

Each round appends one line of tokens to FOLDER/rounds.jsonl. Before each it reads FOLDER/order.json: {"rounds": most,
"one_by_one": whether prompts come one after another, so that of two data-parallel ranks one is idle}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS, TOKENS = 6, 24
DEFAULTS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
EPLB = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 4}}
METADATA = "Metadata-Version: 2.1\nName: evenroute-test-shims\nVersion: 0\n"
POINTS = """[vllm.general_plugins]
evenroute_cpu = support.vllm_engine.cpu:register
evenroute_checks = support.vllm_engine.checks:register
"""


def engine_environment(folder: Path, base: dict[str, str], *, shims: bool, **extra: str) -> dict[str, str]:
    """The environment of an engine's processes: with the shims for CPUs as plug-ins of vLLM's, unless it is plain."""
    paths = base.get("PYTHONPATH", "").split(os.pathsep)
    if shims:
        points = folder / "plugins" / "evenroute_test_shims-0.dist-info"
        points.mkdir(parents=True, exist_ok=True)
        (points / "METADATA").write_text(METADATA)
        (points / "entry_points.txt").write_text(POINTS)
        paths = [str(points.parent), *paths]
    known = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "OMP_NUM_THREADS": "1",
    }
    return {**base, **known, "PYTHONPATH": os.pathsep.join(paths), **extra}


async def _run(folder: Path, arguments: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**{**DEFAULTS, **arguments}))
    sampling = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(number: int, round_: int) -> list[int]:
        ids = [(7 * number + j * j * 3 + 5) % 500 + 3 for j in range(10 + 3 * number)]
        tokens: list[int] = []
        async for out in engine.generate(
            {"prompt_token_ids": ids}, sampling, request_id=f"{round_}-{number}"
        ):
            tokens = list(out.outputs[0].token_ids)
        return tokens

    done = 0
    with (folder / "rounds.jsonl").open("a") as rounds:
        while done < (order := json.loads((folder / "order.json").read_text()))["rounds"]:
            if order.get("one_by_one"):
                found = [await one(number, done) for number in range(PROMPTS)]
            else:
                found = await asyncio.gather(*(one(number, done) for number in range(PROMPTS)))
            print(json.dumps(found), file=rounds, flush=True)
            done += 1
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), json.loads(sys.argv[2])))
