"""Reads the seams of every vLLM that is known out of its wheel, and says what changed: `make check-vllm-seams`.

python -m support.vllm_engine.wheels FOLDER [VERSION ...]

Wheels are fetched by `pip download` and never installed; of each only the files with seams stay in FOLDER/VERSION.
Exit status 1 if a version is not as `evenroute.dist.engines.vllm.seams` knows it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from evenroute.dist.engines.plugin import version_numbers
from evenroute.dist.engines.seams import Found, Seam, find_seams, seam_problem
from evenroute.dist.engines.vllm.seams import DOORS, FIRST, LAST, SEAMS

VERSIONS = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
ALL = SEAMS + DOORS
# Any platform's wheel will do: only its sources are read.
PLATFORM = ["--python-version", "3.12", "--implementation", "cp", "--abi", "abi3", "--abi", "cp312"]
PLATFORM += [f"--platform=manylinux_2_{number}_x86_64" for number in (17, 24, 28, 31, 34, 35)]


def fetch(version: str, folder: Path) -> Path:
    """The version's sources with seams, below FOLDER/VERSION."""
    target = folder / version
    if all((target / seam.file).exists() for seam in ALL):
        return target
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            *PLATFORM,
        ]
        subprocess.run([*command, "-d", wheels, f"vllm=={version}"], check=True)
        with zipfile.ZipFile(next(Path(wheels).glob("vllm-*.whl"))) as wheel:
            for file in {seam.file for seam in ALL}:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                (target / file).write_bytes(wheel.read(f"vllm/{file}"))
    return target


def seams_of(folder: Path) -> dict[Seam, Found | None]:
    """What the sources of one version say."""
    return find_seams(ALL, lambda file: (folder / file).read_text() if (folder / file).exists() else None)


def changes(before: dict[Seam, Found | None], after: dict[Seam, Found | None]) -> list[str]:
    """One line for each seam that is not as it was."""
    lines = []
    for seam in ALL:
        old, new = before[seam], after[seam]
        if old is None or new is None:
            if old is not new:
                lines.append(f"{seam} {'is new' if old is None else 'is gone'}")
        elif old.parameters != new.parameters:
            added = [name for name in new.parameters if name not in old.parameters]
            gone = [name for name in old.parameters if name not in new.parameters]
            lines.append(
                f"{seam}: parameters {', '.join([*(f'+{name}' for name in added), *(f'-{name}' for name in gone)])}"
            )
        elif old.text != new.text:
            lines.append(f"{seam}: text {old.text} -> {new.text}")
    return lines


def newer() -> list[str]:
    """Released versions behind the last one that is known."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "vllm"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"Available versions: (.*)", done.stdout)
    last = version_numbers(LAST)
    versions = found[1].split(", ") if found else []
    return [version for version in versions if version_numbers(version)[: len(last)] > last]


def main(folder: Path, versions: list[str]) -> int:
    """Prints what is wrong and what changed."""
    folder.mkdir(parents=True, exist_ok=True)
    before: dict[Seam, Found | None] | None = None
    wrong = 0
    for version in versions or VERSIONS:
        found = seams_of(fetch(version, folder))
        problems = [
            problem for problem in (seam_problem(seam, one) for seam, one in found.items()) if problem
        ]
        wrong += bool(problems)
        print(f"vLLM {version}: {'known' if not problems else 'NOT KNOWN'}, {len(found)} seams")
        for line in problems:
            print(f"  {line}")
        for line in changes(before, found) if before is not None else []:
            print(f"    changed: {line}")
        before = found
    print(f"known: {FIRST} to {LAST}; released since: {', '.join(newer()) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
