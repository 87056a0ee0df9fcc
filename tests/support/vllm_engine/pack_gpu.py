"""Packs a vLLM for a machine with one H200, PyTorch and transformers, and without a network.

python -m support.vllm_engine.pack_gpu VLLM_WHEEL DEPENDENCIES OUT [--part-mib 60]

VLLM_WHEEL is the release that pins the machine's torch (0.26.0: torch 2.11), DEPENDENCIES a folder of wheels that
it lacks. OUT gets vllm.tar.xz.00, .01, ... of at most so many MiB each: unpack with
`cat vllm.tar.xz.* | tar -xJ -C SITE`. Left out: what an H200 does not run (FlashAttention 2, kernels of other chips),
and data files of dependencies that only other features read.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_FATBIN, _HEADER, _ENTRY = 0xBA55ED50, struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
_ARCH = 90  # sm_90 and sm_90a
LEFT_OUT = (
    *(
        "vllm/vllm_flash_attn/_vllm_fa2_C*",
        "vllm/vllm-rs",
        "vllm/_flashmla*",
        "vllm/_qutlass*",
        "vllm/_rust*",
    ),
    *("vllm/third_party/deep_gemm/_C.cpython-31[01345]*", "*/swagger-ui*", "pycountry/locales/*", "*.pyi"),
    *("mistral_common/data/*", "*/tests/*", "*.dist-info/RECORD"),
)


def entries(data: bytes | bytearray) -> Iterator[list[tuple[int, int, int, int]]]:
    """Of each fat binary in a library: (kind, architecture, start, stop) of its entries' payloads."""
    place = 0
    while (place := data.find(struct.pack("<I", _FATBIN), place)) >= 0:
        _, _, header, size = _HEADER.unpack_from(data, place)
        found, at, end = [], place + header, place + header + size
        while at + _ENTRY.size <= end <= len(data):
            kind, _, entry_header, payload, *_, arch = _ENTRY.unpack_from(data, at)
            if kind not in (1, 2) or entry_header < _ENTRY.size:
                break
            found.append((kind, arch, at + entry_header, at + entry_header + payload))
            at += entry_header + payload
        yield found
        place += 8


def for_one_chip(library: bytes) -> bytes:
    """The library with the kernels of other chips as zeros, which pack to nothing; headers and places stay."""
    data = bytearray(library)
    for found in entries(library):
        if any(kind == 2 and arch == _ARCH for kind, arch, _, _ in found):
            for kind, arch, start, stop in found:
                if kind != 2 or arch != _ARCH:
                    data[start:stop] = bytes(stop - start)
    return bytes(data)


def files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """What of a wheel is carried."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
                continue
            data = archive.read(name)
            yield name, for_one_chip(data) if name.startswith("vllm/") and name.endswith(".so") else data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("dependencies", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part-mib", type=int, default=60)
    options = parser.parse_args()
    packed = io.BytesIO()
    with (
        lzma.open(packed, "wb", preset=4) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        for wheel in [options.wheel, *sorted(options.dependencies.glob("*.whl"))]:
            total = 0
            for name, data in files(wheel):
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o755
                archive.addfile(info, io.BytesIO(data))
                total += len(data)
            print(f"{wheel.name}: {total / 2**20:.1f} MiB, packed so far {packed.tell() / 2**20:.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    whole, size = packed.getvalue(), options.part_mib << 20
    for number in range(-(-len(whole) // size)):
        (options.out / f"vllm.tar.xz.{number:02d}").write_bytes(whole[number * size : (number + 1) * size])


if __name__ == "__main__":
    main()
