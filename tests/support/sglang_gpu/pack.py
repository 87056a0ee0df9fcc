"""`pack.py WHEELS OUT [MIB]`: SGLang 0.5.17 for one Hopper machine without a network, in parts of at most so many MiB.

WHEELS holds the wheels of `wheels.txt` for the machine's Python (`pip download --no-deps`). Left out are compiled
kernels that the triton backends never load (FA3, FlashMLA, InfLLM, the sm100 build) and what no server imports; symbols
are stripped. A wheel larger than a part is cut by bytes; `install.sh` there puts it together and checks it.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DROP = {
    "sglang_kernel": r"sgl_kernel/(flash_ops|flashmla_ops|infllm_ops|spatial_ops|sm100/)|^triton_kernels/.*test",
    "sglang": r"^sglang/(multimodal_gen|test|benchmark)/|rust_extensions/_(bench|multimodal)|/configs/E=.*\.json$",
    "xgrammar": r"^xgrammar/lib/.*\.a$",
}
STRIP = re.compile(r"^(xgrammar/|sglang/|zstandard/|apache|torch_memory_saver|tvm_ffi/).*\.so$")


def slimmed(wheel: Path, target: Path) -> None:
    """The wheel without what is dropped, packed again."""
    drop = re.compile(DROP.get(wheel.name.split("-")[0], r"^$"))
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out,
    ):
        for info in source.infolist():
            if drop.search(info.filename):
                continue
            data = source.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not drop.search(line.split(",")[0])).encode()
            elif STRIP.search(info.filename):
                data = without_symbols(data)
            out.writestr(info, data, zipfile.ZIP_DEFLATED, 9)


def without_symbols(data: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        Path(file.name).write_bytes(data)
        subprocess.run(["strip", "--strip-unneeded", file.name], check=True)
        return Path(file.name).read_bytes()


def into_parts(files: list[Path], most: int) -> list[dict[str, bytes]]:
    """Largest first, each piece into the first part with room for it."""
    parts: list[dict[str, bytes]] = []
    for file in sorted(files, key=lambda one: -one.stat().st_size):
        data = file.read_bytes()
        pieces = [data[i : i + most] for i in range(0, len(data), most)]
        for number, piece in enumerate(pieces):
            name = file.name if len(pieces) == 1 else f"{file.name}.piece{number:02d}"
            part = next((one for one in parts if sum(map(len, one.values())) + len(piece) <= most), None)
            if part is None:
                parts.append(part := {})
            part[name] = piece
    return parts


def main() -> None:
    wheels, out = Path(sys.argv[1]), Path(sys.argv[2])
    most = int(sys.argv[3] if len(sys.argv) > 3 else 50) << 20
    slim = out / "slim"
    slim.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")):
        slimmed(wheel, slim / wheel.name)
    parts = into_parts(sorted(slim.glob("*.whl")), most)
    sums = {name: hashlib.sha256(data).hexdigest() for part in parts for name, data in part.items()}
    for number, part in enumerate(parts):
        folder = out / f"part{number}"
        folder.mkdir(exist_ok=True)
        for name, data in part.items():
            (folder / name).write_bytes(data)
        (folder / "sums.json").write_text(json.dumps(sums))
    sizes = [f"{sum(map(len, part.values())) / 2**20:.1f}" for part in parts]
    print(f"{len(list(slim.glob('*.whl')))} wheels in {len(parts)} parts of {', '.join(sizes)} MiB")


if __name__ == "__main__":
    main()
