"""Files of several ranks: are they parts of the job's counts, or copies of the same counts?

Ranks that route their own tokens write parts, which add up; ranks that route all tokens write copies, and adding
those would count every token `ep_size` times. Engines do not say which it is, so the files' content decides:
equal in every pass on every rank = copies, anything else = parts. The verdict is always among the notes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evenroute.eplb._fields import JOB_FIELDS, named
from evenroute.eplb.loads.source import Counts, LoadSource, LoadWindow, PlacementEvent

RankPass = Mapping[int, Counts]  # rank -> counts [L, E] of one pass


def are_copies(passes: Iterator[RankPass]) -> bool:
    """Whether all ranks hold equal counts in every pass (and there are at least two ranks with load)."""
    compared = False
    for counts_of_rank in passes:
        values = list(counts_of_rank.values())
        if len(values) > 1:
            if any(not np.array_equal(values[0], other) for other in values[1:]):
                return False
            compared = compared or bool(values[0].any())
    return compared


def merged(counts_of_rank: RankPass, copies: bool) -> Counts:
    """The job's counts of one pass: one copy, or the sum of the parts."""
    values = list(counts_of_rank.values())
    if copies:
        return values[0]
    total = values[0].copy()
    for part in values[1:]:
        total += part
        if total.min(initial=0) < 0:
            layer = int((total < 0).any(axis=1).argmax())
            raise ValueError(f"the ranks' counts of layer {layer} add up to more than {2**63 - 1}")
    return total


def verdict_note(num_ranks: int, copies: bool) -> str:
    """One line that says what was decided."""
    if copies:
        return f"the files of {num_ranks} ranks are equal in every pass: copies, counted once"
    return f"the files of {num_ranks} ranks are parts of the job's counts: summed"


def chain_parts(sources: Sequence[LoadSource]) -> list[LoadSource]:
    """The files of one rank's recording as one source, in the order of their parts; others as they are.

    Raises:
        ValueError: a part is there twice.
    """
    groups: dict[tuple[object, ...], list[LoadSource]] = {}
    for number, source in enumerate(sources):
        key = (source.recording, source.rank) if source.recording else (number,)
        groups.setdefault(key, []).append(source)
    return [_chained(group) if len(group) > 1 or group[0].part > 1 else group[0] for group in groups.values()]


def _chained(group: Sequence[LoadSource]) -> LoadSource:
    parts = sorted(group, key=lambda source: source.part)
    numbers = [source.part for source in parts]
    for source, following in itertools.pairwise(parts):
        if source.part == following.part:
            raise ValueError(
                f"{following.path}: part {source.part} of the recording is also in {source.path}"
            )
    gaps = itertools.pairwise([0, *numbers])
    missing = [f"{a + 1}" if b == a + 2 else f"{a + 1} to {b - 1}" for a, b in gaps if b > a + 1]
    first = parts[0]
    placements: list[PlacementEvent] = []
    for source in parts:
        for event in source.placements:  # every part begins with the placement in use
            if not placements or event.step != placements[-1].step:
                placements.append(event)

    def open_windows() -> Iterator[LoadWindow]:
        for source in parts:
            yield from source.windows()

    counted = [source.num_windows for source in parts]
    notes = list(dict.fromkeys(note for source in parts for note in source.notes))
    if missing:
        notes.append(f"{first.path.name}: part {', '.join(missing)} of this recording is missing")
    return replace(
        first,
        open_windows=open_windows,
        num_windows=None if None in counted else sum(number or 0 for number in counted),
        placements=placements,
        notes=notes,
        members=parts,
    )


def join_rank_sources(path: Path, sources: Sequence[LoadSource]) -> LoadSource:
    """One source for the whole job out of one source per rank, matched window by window.

    Raises:
        ValueError: parts and wholes are mixed, two files are of one rank, recordings or shapes differ.
    """
    scopes = {source.scope for source in sources}
    if scopes != {"rank"}:
        whole = next(source for source in sources if source.scope == "job")
        raise ValueError(f"{path}: {whole.path.name} holds the whole job, the others one rank's part each")
    ranks = [source.rank for source in sources]
    twice = {rank for rank in ranks if ranks.count(rank) > 1}
    if twice:
        rank = min(r for r in twice if r is not None)
        names = " and ".join(source.path.name for source in sources if source.rank == rank)
        raise ValueError(f"{path}: {names} say they are rank {rank}: give the files of one recording")
    recordings = {source.recording: source.path.name for source in sources if source.recording}
    if len(recordings) > 1:
        names = " and ".join(sorted(recordings.values())[:2])
        raise ValueError(f"{path}: {names} are not of one recording: give the files of one recording")
    shapes = {source.shape for source in sources}
    if len(shapes) != 1:
        raise ValueError(f"{path}: ranks differ in (layers, experts): {sorted(shapes)}")

    def passes() -> Iterator[tuple[int, dict[int, LoadWindow]]]:
        """By step, which is every rank's ascending order."""
        iterators = {int(s.rank or 0): s.windows() for s in sources}
        heads = {rank: next(windows, None) for rank, windows in iterators.items()}
        while any(head is not None for head in heads.values()):
            step = min(head.first_step or 0 for head in heads.values() if head is not None)
            here = {rank: h for rank, h in heads.items() if h is not None and (h.first_step or 0) == step}
            yield step, here
            for rank in here:
                heads[rank] = next(iterators[rank], None)

    copies = are_copies({r: w.counts for r, w in found.items()} for _, found in passes())

    def open_windows() -> Iterator[LoadWindow]:
        for step, found in passes():
            tokens = [window.tokens for window in found.values()]
            known = [count for count in tokens if count is not None]
            yield LoadWindow(
                merged({rank: window.counts for rank, window in found.items()}, copies),
                time=max((w.time for w in found.values() if w.time is not None), default=None),
                first_step=step,
                last_step=max(w.last_step or step for w in found.values()),
                tokens=None if len(known) != len(tokens) else (known[0] if copies else sum(known)),
                complete=len(found) == len(sources) and all(w.complete for w in found.values()),
            )

    first = sources[0]
    # Ranks begin at steps of their own; all know the same placements.
    longest = min(sources, key=lambda s: (s.placements[0].step or 0) if s.placements else 1 << 62)
    return LoadSource(
        path=path,
        kind=f"{first.kind}, {len(sources)} ranks",
        open_windows=open_windows,
        ranks=tuple(sorted(int(rank or 0) for rank in ranks)),
        placements=longest.placements,
        **named((*JOB_FIELDS, "phase", "layer_ids", "placements_are", "placement_map"), first),
        notes=[verdict_note(len(sources), copies), *dict.fromkeys(n for s in sources for n in s.notes)],
        members=list(sources),
    )


def assemble(sources: Sequence[LoadSource]) -> tuple[list[LoadSource], list[str]]:
    """Parts of a rank chained and ranks joined, and one line for every file that turned out damaged on the way.

    Files that cannot belong together (two of one rank, other shapes, a part beside a whole) give no source and one
    line.
    """
    try:
        return _joined(sources), []
    except (ValueError, OSError) as error:
        good, bad = sound(sources)
        if not bad:
            return [], [_line(error)]
    found, more = assemble(good)
    return found, [*bad, *more]


def without_damaged(source: LoadSource) -> tuple[list[LoadSource], list[str]]:
    """What is left of a source that failed while it was read: its sound files, and one line for each other one.

    No source where it was one file.
    """
    good, bad = sound(_files(source))
    found, more = assemble(good)
    return found, [*bad, *more]


def sound(files: Sequence[LoadSource]) -> tuple[list[LoadSource], list[str]]:
    """Those that can be read to their end, and one line for each other one; reads all of them."""
    good, bad = [], []
    for file in files:
        try:
            for _ in file.windows():
                pass
        except (ValueError, OSError) as error:
            bad.append(_line(error))
        else:
            good.append(file)
    return good, bad


def _files(source: LoadSource) -> list[LoadSource]:
    if not source.members:
        return [source]
    return [file for member in source.members for file in _files(member)]


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _joined(sources: Sequence[LoadSource]) -> list[LoadSource]:
    found = chain_parts(sources)
    of_ranks = [source for source in found if source.scope == "rank"]
    loads = [source for source in found if source.has_loads]
    if len(of_ranks) > 1 or (of_ranks and len(loads) > len(of_ranks)):
        joined = join_rank_sources(of_ranks[0].path.parent, loads)
        return [source for source in found if not source.has_loads] + [joined]
    return found
