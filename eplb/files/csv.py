"""CSV and TSV: rows are layers and columns experts, or one row a count with columns layer, expert and count.

A file has one separator. A header line and a column of row labels are left out where they are known as such: a header
holds words or counts 0, 1, 2, ...; a column of labels holds words, or has a header without a name (as pandas writes
its index) or one that says index or layer.
"""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from evenroute.eplb._io import read_input_text
from evenroute.eplb.files.format import Format, Reading
from evenroute.eplb.files.layout import plain_source
from evenroute.eplb.loads.decoding import reading
from evenroute.eplb.loads.source import Counts, LoadSource

_LABELS = re.compile(r"(unnamed: \d+|index|layer([ _]?(id|idx|index))?|)", re.IGNORECASE)
_LONG = {
    "layer": re.compile(r"(moe[ _]?)?layer([ _]?(id|idx|index))?", re.IGNORECASE),
    "expert": re.compile(r"(logical[ _]?)?expert([ _]?(id|idx|index))?", re.IGNORECASE),
    "count": re.compile(r"(token[ _]?)?(counts?|loads?|tokens|num[ _]?tokens)", re.IGNORECASE),
}
_MOST_PLACES = 1 << 24


def read_csv(path: Path, given: Reading) -> list[LoadSource]:
    """One window of loads ``[L, E]``."""
    with reading(path):
        text = read_input_text(path, encoding="utf-8-sig")
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        rows = _cells(lines)
        places = _long_columns(rows[0])
        counts = _long_form(rows[1:], places) if places else _wide_form(rows)
        return [plain_source(path, "csv", counts, given.layout)]


def _cells(lines: list[str]) -> list[list[str]]:
    found = [mark for mark in (",", ";", "\t") if any(mark in line for line in lines)]
    if len(found) > 1:
        raise ValueError(f"separators {found[0]!r} and {found[1]!r} in one file: which divides the columns?")
    if found:
        rows = list(csv.reader(lines, delimiter=found[0]))
    else:
        rows = [line.split() for line in lines]
    rows = [[cell.strip() for cell in row] for row in rows]
    if all(len(row) > 1 and not row[-1] for row in rows):  # a separator at every line's end
        rows = [row[:-1] for row in rows]
    return rows


def _number(cell: str) -> int | float | None:
    for kind in (int, float):  # an integer stays one: a float has no odd one above 2**53
        with suppress(ValueError):
            return kind(cell)
    return None


def _array(counts: Any) -> Counts:
    """int64 if all are integers that fit, else float64."""
    found = np.array(counts)
    return found if found.dtype.kind == "i" else found.astype(np.float64)


def _long_columns(header: list[str]) -> dict[str, int]:
    """Columns of layer, expert and count; empty where the header does not name all three once."""
    places = {}
    for field, pattern in _LONG.items():
        at = [index for index, name in enumerate(header) if pattern.fullmatch(name)]
        if len(at) != 1:
            return {}
        places[field] = at[0]
    return places


def _long_form(rows: list[list[str]], places: dict[str, int]) -> Counts:
    found: dict[tuple[int, int], int | float] = {}
    for number, row in enumerate(rows, start=1):
        values = {field: _number(row[at]) if at < len(row) else None for field, at in places.items()}
        layer, expert, count = values["layer"], values["expert"], values["count"]
        if (
            layer is None
            or expert is None
            or count is None
            or layer % 1
            or expert % 1
            or min(layer, expert) < 0
        ):
            raise ValueError(f"row {number} is not a layer, an expert and a count: {row}")
        place = int(layer), int(expert)
        if place in found:
            raise ValueError(
                f"row {number} counts layer {place[0]} expert {place[1]} again: one window a file"
            )
        found[place] = count
    if not found:
        raise ValueError("a header and no counts")
    shape = (max(layer for layer, _ in found) + 1, max(expert for _, expert in found) + 1)
    if shape[0] * shape[1] > _MOST_PLACES:
        raise ValueError(
            f"layer {shape[0] - 1} and expert {shape[1] - 1}, expected at most {_MOST_PLACES} places"
        )
    given = _array(list(found.values()))
    counts: Counts = np.zeros(shape, np.int64) if given.dtype.kind == "i" else np.zeros(shape)
    counts[tuple(np.array(list(found)).T)] = given
    return counts


def _wide_form(rows: list[list[str]]) -> Counts:
    width = max(len(row) for row in rows)
    header = rows[0] if len(rows) > 1 and _is_header(rows[0]) else None
    body = rows[1:] if header is not None else rows
    labelled = all(len(row) == width for row in body) and (
        (header is not None and len(header) == width and _LABELS.fullmatch(header[0]) is not None)
        or (header is not None and len(header) == width - 1)
        or all(row[0] and _number(row[0]) is None for row in body)
    )
    kept = [row[1:] if labelled else row for row in body]
    counted = [[_number(cell) for cell in row] for row in kept]
    for number, values in enumerate(counted):
        if None in values:
            raise ValueError(f"row {number} is not numbers: {','.join(kept[number])[:60]!r}")
    lengths = sorted({len(row) for row in counted})
    if len(lengths) != 1 or lengths == [0]:
        raise ValueError(f"expected rows of equally many numbers, found row lengths {lengths[:6]}")
    loads = _array(counted)
    if header is None and len(loads) > 2 and np.array_equal(loads[:, 0], np.arange(len(loads))):
        raise ValueError("the first column counts 0, 1, 2, ...: is it an index? Give the columns a header")
    return loads


def _is_header(cells: list[str]) -> bool:
    """Words, or the numbers 0, 1, 2, ... behind at most one label."""
    numbers = [_number(cell) for cell in cells]
    if None in numbers[1:]:
        return True
    counting = [float(index) for index in range(len(cells))]
    return len(cells) > 2 and (numbers == counting or numbers[1:] == counting[:-1])


FORMAT = Format("csv", matches=lambda file: file.suffix in (".csv", ".tsv"), read=read_csv)
