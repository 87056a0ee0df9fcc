"""Dockerfiles: small, non-root, of files and extras that exist. Nothing is built here:
deploy/README.md says what was, by hand."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from support.command_lines import parse_any
from support.deploy_files import DEPLOY, ROOT

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    pairs = [line.strip().partition(" ") for line in lines if line.strip()]
    return [(name, rest.strip()) for name, _, rest in pairs]


KNOWN = re.compile("ARG|FROM|WORKDIR|COPY|RUN|LABEL|ENV|USER|VOLUME|EXPOSE|STOPSIGNAL|ENTRYPOINT|CMD")
by_file = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def values(path: Path, name: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == name]


@by_file
def test_instructions_are_known_and_in_order(path: Path) -> None:
    names = [name for name, _ in instructions(path)]
    assert all(KNOWN.fullmatch(name) for name in names), names
    assert names[0] == "ARG"
    stages = [index for index, name in enumerate(names) if name == "FROM"]
    assert len(stages) == 2, "build tools stay in the first stage"


@by_file
def test_ends_as_a_numbered_user_that_is_not_root(path: Path) -> None:
    after_last_stage = [name for name, _ in instructions(path)][::-1]
    assert "USER" in after_last_stage[: after_last_stage.index("FROM")]
    assert values(path, "USER") == ["10001:10001"]  # runAsNonRoot needs a number


@by_file
def test_copies_what_the_context_has(path: Path) -> None:
    ignored = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    for rest in values(path, "COPY"):
        *sources, _ = rest.split()
        if sources[0].startswith("--from="):
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source in allowed, f"{source} is kept out by {path.name}.dockerignore"
    assert {"evenroute", "eplb", "routing", "dist", "tools"} <= allowed  # pyproject.toml names them all
    copied = {source for rest in values(path, "COPY") for source in rest.split()[:-1]}
    assert {"evenroute", "eplb", "routing", "dist", "tools"} <= copied


@by_file
def test_installs_extras_that_exist(path: Path) -> None:
    [install] = [rest for rest in values(path, "RUN") if "pip install" in rest]
    target = shlex.split(install)[-1]
    extras = re.findall(r"\[([a-z,]+)\]", target)
    wanted = {"rank"} if path.name.startswith("rank.") else set()
    assert {extra for group in extras for extra in group.split(",")} == wanted
    assert wanted <= set(PROJECT["optional-dependencies"])
    assert ("-c constraints.txt" in install) == (path.name != "vllm.Dockerfile")  # vLLM's own versions there


@by_file
def test_starts_a_command_that_exists(path: Path) -> None:
    entrypoint = [json.loads(rest) for rest in values(path, "ENTRYPOINT")]
    [command] = [json.loads(rest) for rest in values(path, "CMD")]
    if entrypoint == [["vllm", "serve"]]:
        return
    parse_any([*(entrypoint[0] if entrypoint else []), *command])


@by_file
def test_tag_in_the_build_line_is_the_version(path: Path) -> None:
    tags = re.findall(r"evenroute/[a-z]+:([0-9.]+)", path.read_text())
    assert tags
    assert set(tags) == {PROJECT["version"]}


def test_ports_are_those_of_the_settings() -> None:
    [exposed] = values(DEPLOY / "docker/rebalancer.Dockerfile", "EXPOSE")
    for path in DEPLOY.rglob("evenroute.toml"):
        settings = tomllib.loads(path.read_text())["rebalancer"]
        ports = [settings[name].rpartition(":")[2] for name in ("bind", "http_bind")]
        assert ports == exposed.split()
