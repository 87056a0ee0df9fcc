"""Makes the sample loads in `examples/data`: `python examples/make_loads.py [FOLDER]`. They are drawn, not recorded.

Six windows of 16 MoE layers with 256 experts, top-8, 100,000 tokens each, in the form that SGLang's recorder writes
(`{"logical_count": [layers][experts]}`). Traffic is chat, then code, then chat again, then mathematics. In every layer
an expert's popularity is the product of three log-normal factors: one of the model (it stays), one of the kind of
traffic, and a small drift from window to window. Their spreads are chosen so that rank loads are about as uneven as
those that DeepSeek published for its own serving: the busiest of 32 ranks gets two to three times the mean.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

LAYERS, EXPERTS, TOP_K, TOKENS = 16, 256, 8, 100_000
WINDOWS = ("chat", "chat", "code", "code", "chat", "math")
MODEL_SPREAD, TRAFFIC_SPREAD, DRIFT_SPREAD = 0.8, 0.7, 0.08


def popularity(generator: np.random.Generator, spread: float) -> np.ndarray:
    """`[layers, experts]`, log-normal with its spread varied from layer to layer."""
    spreads = spread * generator.uniform(0.7, 1.3, (LAYERS, 1))
    return np.exp(generator.standard_normal((LAYERS, EXPERTS)) * spreads)


def make_loads(folder: Path) -> list[Path]:
    """Writes one file a window and returns their paths in order."""
    generator = np.random.default_rng(20260)
    model = popularity(generator, MODEL_SPREAD)
    traffic = {kind: popularity(generator, TRAFFIC_SPREAD) for kind in sorted(set(WINDOWS))}
    paths = []
    for number, kind in enumerate(WINDOWS, start=1):
        weights = model * traffic[kind] * popularity(generator, DRIFT_SPREAD)
        shares = weights / weights.sum(axis=1, keepdims=True)
        shares = np.minimum(shares, 0.9 / TOP_K)  # an expert can take a token once
        shares /= shares.sum(axis=1, keepdims=True)
        counts = [generator.multinomial(TOKENS * TOP_K, row).tolist() for row in shares]
        paths.append(folder / f"{number}_{kind}.json")
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in counts)
        paths[-1].write_text(f'{{"logical_count":[\n{rows}\n]}}\n')
    return paths


if __name__ == "__main__":
    for path in make_loads(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data"):
        print(path)
