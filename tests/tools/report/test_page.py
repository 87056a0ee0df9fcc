"""`evenroute inspect --html` and `--png`: self-contained, drawn, and alive in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import LoadWindow, PlacementEvent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.browser import needs_chromium, rendered, screenshot
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.foreign_files import random_counts

EXPERTS, LAYERS, RANKS = 16, 6, 4


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve windows, a placement after the sixth, one layer without load, a hostile model name."""
    path = tmp_path_factory.mktemp("page") / "run.evd"
    counts = random_counts(12, LAYERS, EXPERTS)
    counts[:, 0] = 0
    header = DumpHeader(
        num_layers=LAYERS,
        num_logical_experts=EXPERTS,
        ep_size=RANKS,
        num_slots=20,
        top_k=2,
        model="</script><b>\u2028bold",
    )
    start = Placement.initial(LAYERS, EXPERTS, 20, Topology(RANKS))
    with DumpWriter(path, header) as writer:
        for step in range(12):
            if step == 6:
                writer.add_placement(PlacementEvent(start, 6.0, 6, 3, 1, 0.5, 0.9, 7, "global", "<i>why</i>"))
            writer.add_window(LoadWindow(counts[step], float(step), step, step, tokens=100))
    return path


@pytest.fixture(scope="module")
def page(dump: Path) -> Path:
    target = dump.with_suffix(".html")
    outcome = evenroute("inspect", dump, "--html", target)
    assert outcome.status == 0, outcome.err
    return target


def test_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(src|href)\s*=", text)
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2


def test_page_holds_the_figures_of_the_json(page: Path, dump: Path) -> None:
    facts = evenroute("inspect", dump, "--json").json["sources"][0]
    raw = page.read_text().split('type="application/json">', 1)[1].split("</script>", 1)[0]
    (source,) = json.loads(raw)["sources"]
    assert source["before"]["mean"] == facts["balancedness"]["mean"]
    assert source["before"]["per_layer"][0] is None
    assert source["after"]["mean"] > source["before"]["mean"]
    assert len(source["experts"]) == LAYERS
    assert source["placements"][0]["window"] == 6


def test_several_sources_share_a_page(dump: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    np.save(other, random_counts(2, 3, 8))
    target = tmp_path / "page.html"
    assert evenroute("inspect", dump, other, "--html", target).status == 0
    raw = target.read_text().split('type="application/json">', 1)[1].split("</script>", 1)[0]
    assert [source["name"] for source in json.loads(raw)["sources"]] == ["run.evd", "other.npy"]


@needs_chromium
def test_page_draws_and_answers_the_mouse(page: Path, tmp_path: Path) -> None:
    """Heatmaps are painted; hovering shows a cell, clicking a row shows its layer, sorting re-orders."""
    probe = """
    <script>addEventListener("load", () => { const out = [];
      const painted = id => { const c = document.getElementById(id), g = c.getContext("2d");
        const seen = new Set(); const d = g.getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < d.length; i += 4 * 97) seen.add(d.slice(i, i + 3).join()); return seen.size; };
      for (const id of ["before", "after", "experts", "time", "bars"]) out.push(id + "=" + painted(id));
      const canvas = document.getElementById("before"), box = canvas.getBoundingClientRect();
      const at = { clientX: box.left + 60, clientY: box.top + box.height * .55, bubbles: true };
      canvas.dispatchEvent(new MouseEvent("mousemove", at));
      out.push("tip=" + document.getElementById("tip").textContent.replaceAll("\\n", " | "));
      const old = document.body.dataset.layer;
      canvas.dispatchEvent(new MouseEvent("click", at)); out.push("layers=" + old + ">" + document.body.dataset.layer);
      document.getElementById("byLoad").click();
      out.push("sorted=" + document.getElementById("byLoad").getAttribute("aria-pressed"));
      const p = document.createElement("pre"); p.id = "probe"; p.textContent = out.join("\\n"); document.body.append(p);
    });</script>"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</body>", probe + "</body>"))
    dom = rendered(copy)
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)
    assert found, dom[-3000:]
    values = dict(line.split("=", 1) for line in found[1].splitlines())
    for name in ("before", "experts", "time", "bars"):
        assert int(values[name]) >= 4, values
    assert re.match(r"layer \d+, rank \d+ \| [\d.]+ x mean", values["tip"])
    old, new = values["layers"].split("&gt;")
    assert old != new
    assert values["sorted"] == "true"
    assert 'data-ready="1"' in dom
    assert "&lt;i&gt;why&lt;/i&gt;" in dom  # text of a store is shown, never interpreted
    assert "<b>" not in dom.split('id="what"', 1)[1].split("</header>", 1)[0]


@needs_chromium
def test_screenshot_on_a_laptop(page: Path, tmp_path: Path) -> None:
    """The first screen of a laptop is not blank and shows both sides of the colour scale."""
    matplotlib_image = pytest.importorskip("matplotlib.image")
    pixels = matplotlib_image.imread(screenshot(page, tmp_path / "shot.png"))[:, :, :3]
    assert pixels.shape[:2] == (768, 1366)
    reds = (pixels[..., 0] - pixels[..., 2] > 0.2).mean()
    blues = (pixels[..., 2] - pixels[..., 0] > 0.2).mean()
    assert reds > 0.005
    assert blues > 0.005


def test_png(dump: Path, tmp_path: Path) -> None:
    matplotlib_image = pytest.importorskip("matplotlib.image")
    target = tmp_path / "ticket.png"
    assert evenroute("inspect", dump, "--png", target).status == 0
    pixels = matplotlib_image.imread(target)
    assert pixels.shape[1] > 1000
    assert np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0).shape[0] > 50


def test_png_without_matplotlib_says_what_to_install(dump: Path, tmp_path: Path) -> None:
    outcome = evenroute_without("matplotlib", "inspect", dump, "--png", tmp_path / "x.png")
    assert_one_line_error(outcome, "evenroute[report]")


def test_a_plan_that_does_not_fit_is_refused(dump: Path, tmp_path: Path) -> None:
    outcome = evenroute("inspect", dump, "--html", tmp_path / "x.html", "--plan-slots", 17)
    assert_one_line_error(outcome, "num_slots=17")
    assert not (tmp_path / "x.html").exists()
