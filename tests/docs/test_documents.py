"""No command, flag, metric, file, make target or module in the documents that does not exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import evenroute
from evenroute.dist.web.metrics import metric_names
from evenroute.tools import sglang as adapter_sglang
from evenroute.tools.cli import command_names
from support.command_lines import INLINE, all_flags, commands_in_line, parse_any, parse_evenroute, shell_lines
from support.deploy_files import ROOT

DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/*.md", "deploy/*.md", "examples/*.md") for path in ROOT.glob(pattern)
)
BY_DOCUMENT = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

# Flags of others' commands that the documents name.
FOREIGN_FLAGS = {
    "--rdzv-conf",
    *(
        "--standalone",
        "--nnodes",
        "--node-rank",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--max-restarts",
    ),
    *("--enable-eplb", "--enable-expert-parallel", "--eplb-config", "--init-expert-location", "--ep-size"),
    *(
        "--ep-num-redundant-experts",
        "--ep-dispatch-algorithm",
        "--expert-distribution-recorder-mode",
        "--page-size",
    ),
    *(
        "--moe-a2a-backend",
        "--moe-runner-backend",
        "--block-size",
        "--nodes",
        "--outdir",
        "--disable-shared-experts-fusion",
    ),
    *(
        "--model-path",
        "--tp-size",
        "--pp-size",
        "--dp-size",
        "--enable-dp-attention",
        "--no-deps",
        "--nnodes",
    ),
    *(
        "--elastic-ep-backend",
        "--enable-elastic-ep",
        "--enable-two-batch-overlap",
        "--enable-pdmux",
        "--enable-waterfill",
    ),
    *("--enable-memory-saver", "--startup-weight-load-mode", "--eplb-rebalance-num-iterations", "--eplb-"),
    # vLLM's
    *(
        "--additional-config",
        "--tensor-parallel-size",
        "--data-parallel-size",
        "--moe-backend",
        "--all2all-backend",
    ),
    *("--expert-placement-strategy", "--shutdown-timeout"),
}
PLACEHOLDER = re.compile(r"[<>*{}$\[\]]|\.\.\.|…")


def text_of(path: Path) -> str:
    return path.read_text()


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def is_template(argv: list[str]) -> bool:
    """`evenroute status ADDR`: words in capitals stand for values; such a line is checked by its flags alone."""
    return any(re.fullmatch(r"[A-Z][A-Z_]+(\.\.\.)?|\.\.\.|[A-Za-z|-]*\|[A-Za-z|-]*", word) for word in argv)


def check_template(argv: list[str]) -> None:
    name = argv[1] if len(argv) > 1 else ""
    assert name in command_names(), f"no command {name!r}: {' '.join(argv)}"
    unknown = {word.split("=")[0] for word in argv if word.startswith("--")} - all_flags()
    assert not unknown, f"no flags {sorted(unknown)}: {' '.join(argv)}"


def filled(argv: list[str]) -> list[str]:
    """Placeholders that stand for plain values."""
    values = {"ADDR": "ipc:///tmp/evenroute.sock", "DIR": "keys", "FILE": "file.json", "N": "2"}
    return [values.get(word, word) for word in argv]


@BY_DOCUMENT
def test_commands_are_parsed_by_the_real_command_line(path: Path) -> None:
    text = text_of(path)
    lines = [*shell_lines(text), *INLINE.findall(text)]
    for line in lines:
        if "…" in line:
            continue
        for argv in commands_in_line(line):
            words = filled(argv)
            if argv[0].endswith("evenroute") and len(argv) == 1:
                continue
            if argv[1:3] == ["-m", "evenroute.tools.sglang"]:
                if len(argv) > 3:
                    adapter_sglang.build_parser().parse_args(words[3:])
            elif argv[0].endswith("evenroute") and (is_template(words) or len(argv) == 2 or "--help" in argv):
                check_template(words)
            elif argv[0].endswith("torchrun") and is_template(words):
                continue
            else:
                parse_any(words)


@BY_DOCUMENT
def test_flags_exist(path: Path) -> None:
    known = all_flags() | FOREIGN_FLAGS | set(adapter_sglang.build_parser()._option_string_actions)
    for span in code_spans(text_of(path)):
        if span.split()[0] in ("pip", "docker", "kubectl", "apt-get"):
            continue
        for flag in re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", span):
            assert flag in known, f"{path.name}: no flag {flag} (in `{span}`)"


@BY_DOCUMENT
def test_metrics_exist(path: Path) -> None:
    for name in re.findall(r"\bevenroute_[a-z_]+\b", text_of(path)):
        assert name in metric_names(), f"{path.name}: no metric {name}"


@BY_DOCUMENT
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = [span for span in code_spans(text_of(path)) if span.startswith("make ")]
    named += [line for line in shell_lines(text_of(path)) if line.startswith("make ")]
    for command in named:
        for word in command.split("#")[0].split()[1:]:
            if "=" not in word:
                assert word in targets, f"{path.name}: no make target {word}"


@BY_DOCUMENT
def test_files_exist(path: Path) -> None:
    """Links, and code spans that look like a path of this repository."""
    text = text_of(path)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", without_blocks(text)):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: link to {target}"
    roots = {entry.name for entry in ROOT.iterdir()}
    for span in code_spans(text):
        if PLACEHOLDER.search(span) or " " in span or "://" in span or span.startswith("build/"):
            continue
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.split("/")[0] in roots:
            base = ROOT / span
            assert base.exists() or base.with_suffix(".py").exists(), f"{path.name}: no file {span}"


@BY_DOCUMENT
def test_modules_and_names_exist(path: Path) -> None:
    for span in code_spans(text_of(path)):
        if not re.fullmatch(r"evenroute(\.\w+)+(:\w+)?", span):
            continue
        module, _, attribute = span.partition(":")
        parts = module.split(".")
        if len(parts) == 2 and parts[1] in evenroute.__all__:
            continue
        if not attribute and importlib.util.find_spec(module) is None and len(parts) > 3:
            module, attribute = ".".join(parts[:-1]), parts[-1]
        assert importlib.util.find_spec(module) is not None, f"{path.name}: no module {span}"
        if attribute:
            assert hasattr(importlib.import_module(module), attribute), f"{path.name}: no name {span}"


@BY_DOCUMENT
def test_tests_that_are_named_exist(path: Path) -> None:
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text_of(path)):
        assert f"def {name}(" in tests, f"{path.name}: no test {name}"


def test_the_walk_would_find_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="no command 'rebalnce'"):
        check_template(["evenroute", "rebalnce", "ADDR"])
    with pytest.raises(AssertionError, match=r"no flags \['--keyz'\]"):
        check_template(["evenroute", "status", "ADDR", "--keyz", "FILE"])
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parse_evenroute(["status", "ipc:///x", "--tiemout", "3"])
    with pytest.raises(SystemExit):
        parse_evenroute(["bench", "ep", "--load", "x.json"])
    assert "evenroute_rank_verson" not in metric_names()


def test_readme_engine_block_runs() -> None:
    """The Python shown in the README, put between what its words stand for, routes and counts."""
    import torch
    import torch.distributed as dist

    readme = (ROOT / "README.md").read_text()
    blocks = [block.split("```")[0] for block in readme.split("```python\n")[1:]]
    shown = [block for block in blocks if "RankAgent.start" in block]
    if not shown:
        pytest.skip("README.md shows no engine of one's own yet")
    from evenroute import ExpertCounters, RankAgent

    names: dict[str, object] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names |= {"LAYERS": 2, "EXPERTS": 8, "SLOTS": 8, "TOP_K": 2, "ep_size": 1, "rank": 0, "device": "cpu"}
        names |= {"cpu_group": dist.group.WORLD, "gates": [torch.nn.Linear(4, 8) for _ in range(2)]}
        names |= {"experts": lambda hidden, ids, weights: hidden * weights.sum(1, keepdim=True)}
        block = shown[0].replace('rebalancer="ipc:///tmp/evenroute.sock"', 'rebalancer=""')
        exec(compile(block, "README.md", "exec"), names)
        forward = names["forward"]
        assert callable(forward)
        with torch.no_grad():
            assert forward(torch.randn(5, 4)).shape == (5, 4)
        counters, agent = names["counters"], names["agent"]
        assert isinstance(counters, ExpertCounters)
        assert isinstance(agent, RankAgent)
        assert int(counters.take().sum()) == 2 * 5 * 2, "layers x tokens x top-k"
        agent.close()
    finally:
        dist.destroy_process_group()


def named_files() -> list[tuple[list[str], str]]:
    """Each file or folder that ARCHITECTURE.md's table names, with its row's folders: it lies in one of them."""
    found = []
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("| folder | files |\n|---|---|\n")[2]
    for line in table.splitlines():
        folders, files = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3])
        found += [(folders, folder) for folder in folders]
        found += [(folders, file) for file in files if re.fullmatch(r"\w+/?|\w+\.md", file)]
    return found


def test_architecture_names_files_that_exist() -> None:
    commands = {"inspect", "advise", "replay"}
    names = [(folders, name) for folders, name in named_files() if name not in commands]
    assert len(names) > 90
    wrong = [
        name
        for folders, name in names
        if not any(
            (ROOT / folder / end).exists() for folder in ["", *folders] for end in (name, f"{name}.py")
        )
    ]
    assert wrong == []


def test_architecture_fits_on_one_screen() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 75


def test_walks_name_files_that_exist_and_as_few_as_they_say() -> None:
    """The five walks of docs/CONTRIBUTING.md: each step begins with its file."""
    text = (ROOT / "docs/CONTRIBUTING.md").read_text().partition("## Five walks")[2].partition("\n## ")[0]
    walks = re.split(r"^\*\*A ", text, flags=re.MULTILINE)[1:]
    assert len(walks) == 5
    most = {"score function": 3, "dispatch mode": 2, "planner policy": 1, "file format": 2, "wire message": 3}
    for walk in walks:
        name = walk.partition("**")[0]
        said = int(re.search(r"(\d) files?", walk)[1])  # type: ignore[index]
        files = (
            re.findall(r"^\d\. `([^`]+)`", walk, flags=re.MULTILINE)
            or re.findall(r"`([\w/]+\.py)`", walk)[:1]
        )
        assert len(files) == said <= most[name], f"{name}: {files}"
        for file in re.findall(r"`((?:eplb|routing|dist|tools|tests)/[\w/.]+)`", walk):
            assert (ROOT / file).exists(), f"{name}: no file {file}"
        for path in re.findall(r"-m pytest ([^`]+) -q", walk):
            assert all((ROOT / part).exists() for part in path.split()), f"{name}: {path}"


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("routing/settings/config.py", ["SCORINGS"]),
        ("routing/scores.py", ["SCORES"]),
        ("routing/kernels/scores.py", ["sqrt_softplus"]),
        ("routing/settings/modes.py", ["MODES"]),
        ("eplb/planner/plan.py", ["POLICIES", "_make"]),
        ("eplb/files/megatron.py", ["FORMAT"]),
        ("eplb/files/formats.py", ["FORMATS"]),
        ("dist/wire/messages.py", ["Up", "Down", "PROTOCOL_VERSION"]),
    ],
)
def test_walks_name_what_is_in_the_files(file: str, names: list[str]) -> None:
    walks = (ROOT / "docs/CONTRIBUTING.md").read_text()
    source = (ROOT / file).read_text()
    for name in names:
        assert f"`{name}`" in walks
        assert re.search(rf"^(?:def )?{name}\b", source, flags=re.MULTILINE), f"{file} has no {name}"


def test_the_changelog_has_each_version_and_each_kind_of_change_once():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert versions[0] == "Unreleased"
    assert len(set(versions)) == len(versions) == text.count("\n## ")
    for part in text.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)", part, re.M)
        assert len(set(kinds)) == len(kinds), part[:40]
