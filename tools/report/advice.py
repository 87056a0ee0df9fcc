"""The text of `evenroute advise`: the verdict first, then its reasons as numbers."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from evenroute.tools.inputs import ExpertSize
from evenroute.tools.report.text import console, count, number, pairs
from evenroute.tools.report.words import one_line, plural, short

BEST = {"even": "either", "by_size": "shares by batch size (a Router's default)", "without": "no redundancy"}
STYLES = {"recommend": "bold green", "not now": "bold yellow", "not enough evidence": "bold magenta"}


def show(facts: dict[str, Any], size: ExpertSize) -> None:
    """Print the advice."""
    out = console()
    out.print(Text(f"Verdict: {facts['verdict']}", style=STYLES[facts["verdict"]]))
    for reason in facts["reasons"]:
        out.print(Text(f"  {one_line(reason)}"))
    if "balancedness_now" not in facts:
        return
    out.print()
    out.print(pairs(_lines(facts, size)))


def _lines(facts: dict[str, Any], size: ExpertSize) -> list[tuple[str, str]]:
    redundant = facts["num_redundant_experts"]
    uneven = facts["skew"]["max_over_mean"]
    lines = [
        (
            "cluster",
            f"{facts['ep_size']} ranks ({facts['ep_size_is']}), {facts['num_moe_layers']} MoE layers x "
            f"{facts['num_logical_experts']} experts, top-{facts['top_k']} ({facts['top_k_is']})",
        ),
        (
            "evidence",
            f"{plural(facts['num_windows'], 'stretch', 'es')} in {plural(len(facts['workloads']), 'file')}, "
            f"{count(facts['tokens'])} tokens a layer; hottest expert {uneven['mean']:.1f} x mean "
            f"(worst layer {uneven['worst']:.1f})",
        ),
        (
            "balancedness",
            "mean over layers; total = sum of mean rank loads / sum of largest, which step time follows",
        ),
        ("now", f"{_both(facts, 'now')} ({facts['placement_now']})"),
        ("after a plan", f"{_both(facts, 'after')} with {redundant} redundant experts"),
    ]
    if facts["balancedness_recorded"] is not None:
        lines.append(
            ("as recorded", f"mean {number(facts['balancedness_recorded'])} with the placements in use")
        )
    curve = ", ".join(
        f"{point['num_redundant_experts']}: {point['balancedness']:.4f}"
        for point in facts["redundancy_curve"]
    )
    lines += [
        ("redundant experts", f"mean {curve}"),
        (
            "enough of them",
            f"{facts['smallest_redundancy_within_1_percent']} is the fewest within 1 % of the best",
        ),
        ("plans age", _ageing(facts)),
        (
            "step time",
            f"{-100 * facts['step_time_gain']:+.1f} % with experts taking {100 * facts['experts_share']:.0f} % of a "
            f"step ({facts['experts_share_is']}); {facts['gain_basis']}",
        ),
    ]
    if "batch_tokens" in facts:
        lines.append(
            (
                f"steps of {facts['batch_tokens']:,} tokens",
                f"mean balancedness {number(facts['batch_balancedness_now'])} -> "
                f"{number(facts['batch_balancedness_after'])}",
            )
        )
    lines += _by_batch_size(facts)
    return lines + _price(facts, size) + [("window", _window(facts))] + _phases(facts)


def _by_batch_size(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """A line a batch size: what redundancy costs or gives there, and by which deal."""
    redundant = facts["num_redundant_experts"]
    lines = [("by batch size", f"expected us a layer on the longest rank; {facts['expert_times']}")]
    for row in facts["by_batch_size"]:
        without, even, by_size = row["without_us"], row["even_us"], row["by_size_us"]
        text = f"{without:.0f} without redundancy; with {redundant}: {_change(even / without)} dealt evenly "
        text += f"({even:.0f}), {_change(by_size / without)} with shares by batch size ({by_size:.0f})"
        lines.append((f"  {row['tokens']} tokens a rank", f"{text}: take {BEST[row['best']]}"))
    return lines


def _change(part: float) -> str:
    change = round(100 * (part - 1))
    return f"costs {change} %" if change > 0 else f"gives {-change} %" if change < 0 else "changes nothing"


def _both(facts: dict[str, Any], when: str) -> str:
    mean, total = facts[f"balancedness_{when}"], facts[f"total_balancedness_{when}"]
    return f"mean {number(mean)}, total {number(total)}"


def _ageing(facts: dict[str, Any]) -> str:
    other = facts["balancedness_under_another_workloads_plan"]
    text = "not shown by these loads: they have no time axis"
    if facts["ageing"]:
        values = ", ".join(f"{point['lag']}: {point['balancedness']:.3f}" for point in facts["ageing"])
        lasts = facts["plan_stays_good_windows"]
        seconds = facts["plan_stays_good_seconds"]
        text = f"mean balancedness by stretches since the plan {values}; "
        if lasts is None:
            text += "it kept half of its gain to the end of this history"
        else:
            text += f"half of the gain is lost after {lasts}" + (f" ({duration(seconds)})" if seconds else "")
    return text + ("" if other is None else f"; under another file's plan mean {other:.4f}")


def duration(seconds: float) -> str:
    """ "90 s", "12 min", "5.0 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _price(facts: dict[str, Any], size: ExpertSize) -> list[tuple[str, str]]:
    memory = facts["memory_bytes_per_rank"]
    slots = f"{facts['redundant_slots_per_rank']:.1f} redundant expert weights a rank over all layers"
    if memory is not None:
        slots += f" = {memory / 1e9:.2f} GB ({size.num_bytes / 1e6:.1f} MB each: {size.origin})"  # type: ignore[operator]
        if facts["memory_part"] is not None:
            slots += f", {100 * facts['memory_part']:.1f} % of one {facts['hardware']}"
    else:
        slots += f"; bytes {size.origin}"
    moves = facts["moves_per_plan"]
    if moves is None:
        moving = "not shown by a single window"
    else:
        moving = f"{moves:,.0f} slots a plan (policy {facts['migration_policy']}), "
        moving += f"{facts['plans_per_day']:.1f} plans a day "
        moving += f"(every {duration(facts['replan_seconds'])}: {facts['replan_seconds_is']})"
        if facts["migration_bytes_per_day"] is not None:
            moving += f" = {short(facts['migration_bytes_per_day'])}B a day"
        if facts["migration_seconds_per_day"] is not None:
            moving += f", {facts['migration_seconds_per_day']:.0f} s of a rank's network port"
    return [("memory price", slots), ("migration price", moving)]


def _window(facts: dict[str, Any]) -> str:
    needed = facts["tokens_needed"]
    text = (
        "more than 1,000,000 tokens"
        if needed is None
        else f"about {needed:,} tokens a layer bring a plan within 0.01 of one for exact loads"
    )
    return f"{text} (independent tokens; real ones are correlated, so take more)"


def _phases(facts: dict[str, Any]) -> list[tuple[str, str]]:
    phases = facts["phases"]
    if phases is None:
        return []
    need = "need placements of their own" if phases["own_placements"] else "can share one placement"
    text = f"{need}: own plan {phases['own_plan']:.4f}, the other's {phases['other_phases_plan']:.4f}, "
    return [("prefill, decode", f"{text}one plan for both {phases['one_plan_for_both']:.4f}")]
