"""The dispatch modes: what a router's `dispatch`, `deal` and `tokens` ask for. No torch.

The plain-torch arithmetic of a mode is in `routing/dispatch.py`, the kernel's in `routing/kernels/deal.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from evenroute.eplb._checks import require_choice


class Mode(NamedTuple):
    """One way to find the slot of a (token, logical expert); a row of `MODES`.

    name, dispatch, deals, tokens   how a caller chooses it: `find_mode`
    pick       "slot": the one slot of (rank, expert); "ticket": an atomic ticket an expert; "hash": of (row, expert);
               "batch": by the place among the batch's tokens of the expert, in shares corrected for the batch
    weighted   replicas in planned shares; else evenly
    by_rank    the hash differs by rank, and by the router's seed
    """

    name: str
    dispatch: str
    deals: tuple[str, ...]
    tokens: tuple[str, ...]
    pick: str
    weighted: bool = False
    by_rank: bool = True


DEALS = ("exact", "hash")
ALL_DEALS = (*DEALS, "batch")
TOKEN_MODES = ("own", "shared")
MODES = (
    Mode("static", "static", DEALS, ("own",), "slot"),
    Mode("exact", "dynamic", ("exact",), ("own",), "ticket"),
    Mode("hash", "dynamic", ("hash",), ("own",), "hash"),
    Mode("invariant", "rank_invariant", DEALS, TOKEN_MODES, "hash", by_rank=False),
    Mode("weighted", "weighted", ("exact",), ("own",), "ticket", weighted=True),
    Mode("weighted hash", "weighted", ("hash",), ("own",), "hash", weighted=True),
    Mode("batch", "weighted", ("batch",), ("own",), "batch", weighted=True),
    Mode("batch invariant", "weighted", ("batch",), ("shared",), "batch", weighted=True, by_rank=False),
    Mode("weighted invariant", "weighted", DEALS, ("shared",), "hash", weighted=True, by_rank=False),
)
DISPATCH_MODES = tuple(dict.fromkeys(mode.dispatch for mode in MODES))


def find_mode(dispatch: str, deal: str, tokens: str) -> Mode:
    """The row of `MODES` that a router's three arguments ask for.

    `auto` is the weighted form that the token mode allows (even experts fall back to the even deal by themselves).

    Raises:
        ValueError: an unknown name, or a mode by which ranks with shared tokens could disagree.
    """
    require_choice("tokens", tokens, TOKEN_MODES)
    require_choice("deal", deal, ALL_DEALS)
    require_choice("dispatch", dispatch, ("auto", *DISPATCH_MODES))
    if dispatch == "auto":
        dispatch = "weighted"
    for mode in MODES:
        if mode.dispatch == dispatch and deal in mode.deals and tokens in mode.tokens:
            return mode
    if deal == "batch":
        raise ValueError(
            f"dispatch={dispatch!r} with deal='batch': it corrects planned shares; allowed: auto, weighted"
        )
    allowed = dict.fromkeys(mode.dispatch for mode in MODES if tokens in mode.tokens)
    raise ValueError(
        f"dispatch={dispatch!r} with tokens={tokens!r}: ranks would serve a token twice or never; "
        f"allowed: {', '.join(allowed)}"
    )
