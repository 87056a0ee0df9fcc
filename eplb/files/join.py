"""Files of one recording become one source; a damaged one among them costs its own content, not the others'."""

from __future__ import annotations

from collections.abc import Sequence

from evenroute.eplb.files.ranks import chain_parts, join_rank_sources
from evenroute.eplb.loads.source import LoadSource


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
