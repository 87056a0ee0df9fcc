"""Experts out of a checkpoint, and what a process is told by its environment."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evenroute.dist.config import AgentConfig
from evenroute.dist.elastic.config import ElasticConfig, ProcessPlace
from evenroute.dist.elastic.source import INDEX_FILE, SafetensorsSource, fill_slot
from evenroute.dist.weights.expert_weights import ExpertWeights
from support.refusals import refused

GATE, UP, DOWN = (torch.arange(24.0).reshape(2, 3, 4) + 100 * i for i in range(3))  # [experts, 3, 4]


def checkpoint(folder: Path) -> Path:
    """Two files and their index, experts one by one, as HuggingFace writes them."""
    names = {}
    for layer in (1, 2):
        tensors = {}
        for expert in range(2):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors[f"{prefix}.gate_proj.weight"] = GATE[expert] + layer
            tensors[f"{prefix}.up_proj.weight"] = UP[expert] + layer
            tensors[f"{prefix}.down_proj.weight"] = (DOWN[expert] + layer).T.contiguous()
        save_file(tensors, folder / f"{layer}.safetensors")
        names |= dict.fromkeys(tensors, f"{layer}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    return folder


PREFIX = "model.layers.{layer}.mlp.experts.{expert}"
NAMES = {
    "gate_up": (f"{PREFIX}.gate_proj.weight", f"{PREFIX}.up_proj.weight"),
    "down": f"{PREFIX}.down_proj.weight",
}


def test_an_experts_parts_are_put_together_and_fill_a_slot(tmp_path: Path) -> None:
    source = SafetensorsSource(checkpoint(tmp_path), NAMES, first_layer=1)
    rows = source(1, 0)
    assert torch.equal(rows["gate_up"], torch.cat([GATE[0] + 2, UP[0] + 2]))
    assert torch.equal(rows["down"], (DOWN[0] + 2).T)
    local = [{"gate_up": torch.zeros(2, 6, 4), "down": torch.zeros(2, 4, 3)} for _ in range(2)]
    fill_slot(ExpertWeights(local, 2), 0, 1, 1, source)
    assert torch.equal(local[0]["gate_up"][1], torch.cat([GATE[1] + 1, UP[1] + 1]))
    assert not local[0]["gate_up"][0].any()


def test_stacked_experts_are_read_by_row(tmp_path: Path) -> None:
    save_file({"layers.0.down": DOWN}, tmp_path / "one.safetensors")
    source = SafetensorsSource(tmp_path / "one.safetensors", {"down": "layers.{layer}.down"})
    assert torch.equal(source(0, 1)["down"], DOWN[1])


def test_what_can_not_be_is_told(tmp_path: Path) -> None:
    refused("no .safetensors file found", lambda: SafetensorsSource(tmp_path, NAMES))
    source = SafetensorsSource(checkpoint(tmp_path), NAMES, first_layer=5)
    refused("is not in the checkpoint", lambda: source(0, 0))
    refused("names must map", lambda: SafetensorsSource(tmp_path, {}))
    refused("alone in braces", lambda: SafetensorsSource(tmp_path, {"down": "layers.{number}"}))


def test_elastic_settings_need_a_rebalancer_and_no_shadow() -> None:
    refused("agent.rebalancer: | which alone decides", lambda: ElasticConfig())
    address = "ipc:///run/r.sock"
    refused("agent.mode: 'shadow'", lambda: ElasticConfig(AgentConfig(rebalancer=address, mode="shadow")))
    agent = ElasticConfig(AgentConfig(rebalancer=address), collective_limit_s=3.0).agent
    assert (agent.agree_every, agent.require_rebalancer, agent.vote_limit_s) == (1, True, 3.0)


def test_the_launchers_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2",
        "EVENROUTE_MEMBER": "9",
    }
    for name, text in values.items():
        monkeypatch.setenv(name, text)
    found = ProcessPlace.from_environment()
    assert (found.rank, found.world_size, found.identity, found.joins) == (2, 4, 9, False)
    monkeypatch.setenv("RANK", "two")
    refused("RANK: 'two' found in the environment", lambda: ProcessPlace.from_environment())
    monkeypatch.setenv("EVENROUTE_JOIN", "1")
    assert ProcessPlace.from_environment().joins
