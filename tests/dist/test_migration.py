"""Experts move while the layers run: outputs stay the reference's, weights lie where the tables say."""

from __future__ import annotations

import pytest

from support.moe_world import Case, run_chain
from support.rank_pool import rank_pool

TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}

CASES = [
    Case(ep_size=1, num_slots=8, num_experts=8, seed=1),
    Case(ep_size=2, seed=2, staging_layers=2, num_layers=3),
    Case(ep_size=2, seed=3, dtype="bf16", dispatch="static", verify=True),
    Case(ep_size=2, seed=4, tokens="shared", dispatch="rank_invariant", num_shared=1),
    Case(ep_size=2, seed=5, exchange="padded", num_shared=2, scale_in_router=False),
    Case(ep_size=4, num_nodes=2, seed=6, num_slots=16, agree_every=3, num_shared=1, verify=True),
    Case(ep_size=4, seed=7, num_slots=8, chunk_bytes=512, max_peers=1, scale_in_router=False),
    Case(ep_size=4, seed=8, num_slots=16, tokens="shared", dispatch="rank_invariant", dtype="bf16"),
    Case(ep_size=8, num_nodes=2, seed=9, num_experts=16, num_slots=24, num_layers=4, staging_layers=3),
]


def _check(case: Case, results: list[dict[str, float]]) -> None:
    for found in results:
        assert found["worst"] <= TOLERANCE[case.dtype], case
    assert results[0]["switches"] > 0, case


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"ep{c.ep_size}-{c.tokens}-{c.exchange}-{c.dtype}-{c.seed}"
)
def test_outputs_equal_the_reference_through_a_chain_of_migrations(case: Case) -> None:
    results = rank_pool(case.ep_size).run(run_chain, case, 3)
    _check(case, results)
    if case.num_layers > case.staging_layers:
        assert results[0]["mixed_steps"] > 0, "layers of two versions side by side were part of it"
    if case.ep_size > 1:
        assert sum(found["bytes"] for found in results) > 0
