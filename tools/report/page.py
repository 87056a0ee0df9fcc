# ruff: noqa: E501 - the page's own markup and script
"""The page of `evenroute inspect --html`: one file, no network, heatmaps drawn on canvas.

The page's data is one JSON object in `<script id="data">` (see `evenroute.tools.report.pictures.page_data`).
"""

from __future__ import annotations

import json
from typing import Any


def page(data: dict[str, Any]) -> str:
    """The whole page for ``data``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # "</script>" inside a string would end the element; JSON may write any character as \\u.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return _HEAD + _STYLE + _BODY + text + _SCRIPT_START + _SCRIPT + _END


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>evenroute inspect</title>
"""

_STYLE = """<style>
:root { --ink:#1c2430; --soft:#5d6878; --line:#dde2e9; --page:#f5f6f8; --card:#ffffff; --accent:#0b62c4; }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink); font:14px/1.45 system-ui,"Segoe UI",Roboto,sans-serif; }
header { display:flex; flex-wrap:wrap; gap:6px 18px; align-items:baseline; padding:12px 20px;
  background:var(--card); border-bottom:1px solid var(--line); position:sticky; top:0; z-index:2; }
h1 { font-size:17px; margin:0; } h2 { font-size:14px; margin:0 0 2px; }
header .what { color:var(--soft); } header select { margin-left:auto; font:inherit; padding:3px 6px; max-width:46ch; }
main { max-width:1400px; margin:0 auto; padding:14px 20px 40px; display:grid; gap:14px; }
.card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:12px 14px; min-width:0; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:8px 12px; }
.tile b { display:block; font-size:21px; font-weight:600; font-variant-numeric:tabular-nums; }
.tile span { color:var(--soft); font-size:12px; }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:14px; }
@media (max-width:900px) { .pair { grid-template-columns:1fr; } }
.note { color:var(--soft); font-size:12px; margin:0 0 6px; }
canvas { display:block; width:100%; cursor:crosshair; border-radius:3px; }
.scale { display:flex; align-items:center; gap:8px; color:var(--soft); font-size:12px; margin-top:6px; }
.scale i { display:inline-block; width:180px; height:10px; border-radius:2px; }
.bar { display:flex; gap:8px; align-items:center; margin-bottom:6px; flex-wrap:wrap; }
.bar button { font:inherit; font-size:12px; border:1px solid var(--line); background:#fff; border-radius:5px;
  padding:2px 9px; cursor:pointer; }
.bar button[aria-pressed=true] { background:var(--accent); color:#fff; border-color:var(--accent); }
#tip { position:fixed; pointer-events:none; background:#1c2430; color:#fff; padding:5px 9px; border-radius:5px;
  font-size:12px; white-space:pre; z-index:9; display:none; }
table { border-collapse:collapse; width:100%; font-size:13px; font-variant-numeric:tabular-nums; }
th,td { text-align:right; padding:2px 8px; border-bottom:1px solid var(--line); } th { color:var(--soft); font-weight:500; }
th:first-child,td:first-child { text-align:left; }
.scroll { overflow:auto; max-height:260px; }
</style></head>
"""

_BODY = """<body>
<header><h1>evenroute inspect</h1><span class="what" id="what"></span><select id="pick" aria-label="source"></select></header>
<main>
<noscript>This page draws its heatmaps with JavaScript, which is off.</noscript>
<section class="tiles" id="tiles"></section>
<section class="pair">
 <div class="card"><h2>Layer &times; rank now</h2><p class="note" id="beforeNote"></p>
  <canvas id="before"></canvas></div>
 <div class="card"><h2 id="afterTitle"></h2><p class="note" id="afterNote"></p><canvas id="after"></canvas></div>
</section>
<div class="scale"><span>load / mean of its layer: 0.25</span><i id="ramp"></i><span>4 and more</span>
 <span style="margin-left:10px">&#9641; no data</span></div>
<section class="card"><h2>Layer &times; expert</h2>
 <div class="bar"><span class="note" style="margin:0">columns: logical experts</span>
  <button id="byId" aria-pressed="true">by id</button><button id="byLoad" aria-pressed="false">by load</button></div>
 <canvas id="experts"></canvas></section>
<section class="card" id="timeCard"><h2>Balancedness over time</h2>
 <p class="note">mean over layers; dashed lines: a placement was published; 1 is perfect</p><canvas id="time"></canvas></section>
<section class="pair">
 <div class="card"><h2 id="layerTitle"></h2><p class="note">ranks of this layer: before (grey), after (blue); line: mean</p>
  <canvas id="bars"></canvas></div>
 <div class="card"><h2>Hottest experts of this layer</h2><div class="scroll"><table id="hot"></table></div></div>
</section>
<section class="card" id="placementsCard"><h2>Placements and their effect</h2><div class="scroll"><table id="placements"></table></div></section>
</main><div id="tip" role="status"></div>
<script id="data" type="application/json">"""

_SCRIPT_START = "</script>\n<script>\n"

_SCRIPT = r"""
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
let source = DATA.sources[0], layer = 0, byLoad = false;
const STOPS = [[33,102,172],[146,197,222],[247,247,247],[244,165,130],[178,24,43]];
function colour(x) {                       // x = load / mean; log2 scale from 1/4 to 4
  const at = Math.max(0, Math.min(1, (Math.log2(Math.max(x, 1e-9)) + 2) / 4)) * (STOPS.length - 1);
  const i = Math.min(Math.floor(at), STOPS.length - 2), f = at - i;
  return "rgb(" + [0,1,2].map(k => Math.round(STOPS[i][k] + (STOPS[i+1][k] - STOPS[i][k]) * f)).join(",") + ")";
}
$("ramp").style.background = "linear-gradient(90deg," +
  [-2,-1,0,1,2].map(v => colour(2 ** v)).join(",") + ")";
const fixed = (v, d) => v === null || v === undefined ? "no data" : v.toFixed(d === undefined ? 4 : d);
const big = v => v === null || v === undefined ? "not known" : Number(v).toLocaleString("en-US", {maximumFractionDigits: 0});
function prepare(canvas, height) {
  const width = canvas.clientWidth || 600, ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  const g = canvas.getContext("2d"); g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, width, height);
  g.font = "11px system-ui,sans-serif"; return [g, width, height];
}
const LEFT = 34, BOTTOM = 16, TOP = 5;
function heatmap(canvas, rows, order, rowHeight, cell) {
  const columns = rows[0].length, count = rows.length;
  const [g, width, height] = prepare(canvas, TOP + count * rowHeight + BOTTOM);
  const w = (width - LEFT) / columns;
  for (let r = 0; r < count; r++) {
    const y = TOP + r * rowHeight;
    for (let c = 0; c < columns; c++) {
      const v = rows[r][order ? order[r][c] : c];
      g.fillStyle = source.has_load[r] ? colour(v) : "#e3e6ea";
      g.fillRect(LEFT + c * w, y, Math.ceil(w) + .4, rowHeight - (rowHeight > 5 ? .6 : 0));
    }
    if (r === layer) { g.strokeStyle = "#000"; g.lineWidth = 1.4; g.strokeRect(LEFT, y, width - LEFT - 1, rowHeight - .6); }
  }
  g.fillStyle = "#5d6878"; g.textAlign = "right"; g.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(14 / rowHeight));
  for (let r = 0; r < count; r += every) g.fillText(source.layers[r], LEFT - 5, TOP + r * rowHeight + rowHeight / 2);
  g.textAlign = "center"; g.textBaseline = "top";
  const step = Math.max(1, Math.ceil(columns * 30 / (width - LEFT)));
  if (!order) for (let c = 0; c < columns; c += step) g.fillText(c, LEFT + (c + .5) * w, height - BOTTOM + 3);
  const where = e => {
    const box = canvas.getBoundingClientRect(), r = Math.floor((e.clientY - box.top - TOP) / rowHeight);
    const c = Math.floor((e.clientX - box.left - LEFT) / w);
    return r >= 0 && r < count && c >= 0 && c < columns ? [r, order ? order[r][c] : c] : null;
  };
  canvas.onmousemove = e => { const at = where(e); at ? tip(e, cell(at[0], at[1])) : hide(); };
  canvas.onmouseleave = hide;
  canvas.onclick = e => { const at = where(e); if (at) { layer = at[0]; draw(); } };
}
function tip(e, text) {
  const t = $("tip"); t.textContent = text; t.style.display = "block";
  t.style.left = Math.min(e.clientX + 14, innerWidth - t.offsetWidth - 8) + "px";
  t.style.top = Math.min(e.clientY + 14, innerHeight - t.offsetHeight - 8) + "px";
}
function hide() { $("tip").style.display = "none"; }
function relative(rows) { return rows.map(row => { const m = row.reduce((a, b) => a + b, 0) / row.length || 1; return row.map(v => v / m); }); }
function tiles() {
  const s = source, list = [["balancedness now (mean over layers)", fixed(s.before.mean)],
    ["after a new plan" + (s.after ? ", " + s.after.num_slots + " slots" : ""), s.after ? fixed(s.after.mean) : "not planned"],
    ["worst layer now" + (s.before.worst_layer === null ? "" : ": " + s.before.worst_layer), fixed(s.before.worst)],
    ["slots that would move", s.after ? big(s.after.moves) : "not planned"],
    ["hottest expert / mean (mean over layers)", fixed(s.skew, 2)], ["tokens", big(s.tokens)]];
  $("tiles").replaceChildren(...list.map(([name, value]) => {
    const d = document.createElement("div"); d.className = "tile";
    const b = document.createElement("b"); b.textContent = value;
    const n = document.createElement("span"); n.textContent = name; d.append(b, n); return d; }));
}
function table(target, head, rows) {
  const make = (tag, cells) => { const tr = document.createElement("tr");
    for (const c of cells) { const td = document.createElement(tag); td.textContent = c; tr.append(td); } return tr; };
  target.replaceChildren(make("th", head), ...rows.map(r => make("td", r)));
}
function bars() {
  const before = relative(source.before.ranks)[layer], after = source.after ? relative(source.after.ranks)[layer] : null;
  const [g, width, height] = prepare($("bars"), 190), n = before.length, w = (width - LEFT) / n;
  const top = Math.max(1.2, ...before, ...(after || [0])), y = v => (height - BOTTOM) * (1 - v / top);
  const each = (values, colour, offset, part) => values.forEach((v, i) => {
    g.fillStyle = colour; g.fillRect(LEFT + i * w + w * offset, y(v), Math.max(w * part, 1), height - BOTTOM - y(v)); });
  each(before, "#a9b2bf", .08, after ? .42 : .84); if (after) each(after, "#0b62c4", .5, .42);
  g.strokeStyle = "#1c2430"; g.beginPath(); g.moveTo(LEFT, y(1)); g.lineTo(width, y(1)); g.stroke();
  g.fillStyle = "#5d6878"; g.textAlign = "right"; g.textBaseline = "middle";
  g.fillText("1.0", LEFT - 5, y(1)); g.fillText(top.toFixed(1), LEFT - 5, 7);
  g.textAlign = "center"; g.textBaseline = "top";
  const step = Math.max(1, Math.ceil(n * 26 / (width - LEFT)));
  for (let i = 0; i < n; i += step) g.fillText(i, LEFT + (i + .5) * w, height - BOTTOM + 3);
  $("bars").onmousemove = e => { const i = Math.floor((e.clientX - $("bars").getBoundingClientRect().left - LEFT) / w);
    if (i >= 0 && i < n) tip(e, "rank " + i + "\nbefore " + fixed(before[i], 3) + (after ? "\nafter " + fixed(after[i], 3) : "")); };
  $("bars").onmouseleave = hide;
  const loads = source.experts[layer], order = loads.map((v, i) => i).sort((a, b) => loads[b] - loads[a]).slice(0, 12);
  const mean = loads.reduce((a, b) => a + b, 0) / loads.length || 1;
  table($("hot"), ["expert", "load", "x mean", "of layer"], order.filter(i => loads[i] > 0).map(i =>
    [i, big(loads[i]), (loads[i] / mean).toFixed(2), (100 * loads[i] / (mean * loads.length)).toFixed(2) + " %"]));
  $("layerTitle").textContent = "Layer " + source.layers[layer] + ": balancedness " + fixed(source.before.per_layer[layer]) +
    (source.after ? " now, " + fixed(source.after.per_layer[layer]) + " after" : "");
}
function timeline() {
  const points = source.points; $("timeCard").hidden = points.length < 2; if (points.length < 2) return;
  const [g, width, height] = prepare($("time"), 170), known = points.map(p => p.mean).filter(v => v !== null);
  const low = Math.max(0, Math.min(...known) - .05), last = points[points.length - 1], end = last.window + last.num_windows;
  const x = w => LEFT + (width - LEFT - 6) * w / Math.max(1, end), y = v => 6 + (height - BOTTOM - 6) * (1 - (v - low) / (1 - low));
  g.strokeStyle = "#dde2e9"; g.fillStyle = "#5d6878"; g.textAlign = "right"; g.textBaseline = "middle";
  for (const v of [low, (low + 1) / 2, 1]) { g.beginPath(); g.moveTo(LEFT, y(v)); g.lineTo(width, y(v)); g.stroke(); g.fillText(v.toFixed(2), LEFT - 5, y(v)); }
  g.setLineDash([4, 4]); g.strokeStyle = "#b2182b";
  for (const p of source.placements) if (p.window !== null) { g.beginPath(); g.moveTo(x(p.window), 4); g.lineTo(x(p.window), height - BOTTOM); g.stroke(); }
  g.setLineDash([]); g.strokeStyle = "#0b62c4"; g.lineWidth = 1.6; g.beginPath(); let open = false;
  for (const p of points) { if (p.mean === null) { open = false; continue; }
    const at = [x(p.window + p.num_windows / 2), y(p.mean)]; open ? g.lineTo(...at) : g.moveTo(...at); open = true; }
  g.stroke(); g.textAlign = "center"; g.textBaseline = "top"; g.fillText("window 0", LEFT + 24, height - BOTTOM + 3);
  g.textAlign = "right"; g.fillText("window " + (end - 1), width - 4, height - BOTTOM + 3);
  $("time").onmousemove = e => { const w = (e.clientX - $("time").getBoundingClientRect().left - LEFT) / (width - LEFT - 6) * end;
    const p = points.find(q => w < q.window + q.num_windows) || last;
    tip(e, "window " + p.window + (p.step === null ? "" : ", step " + p.step) + "\nbalancedness " + fixed(p.mean)); };
  $("time").onmouseleave = hide;
}
function draw() {
  const s = source; tiles();
  $("what").textContent = s.title;
  $("beforeNote").textContent = s.placement + "; click a row for its layer";
  $("afterTitle").textContent = s.after ? "Layer \u00d7 rank after a plan with " + s.after.num_slots + " slots" : "No plan";
  $("afterNote").textContent = s.after ? s.after.reason : "";
  const rowHeight = Math.max(4, Math.min(16, Math.floor(330 / s.layers.length)));
  const before = relative(s.before.ranks), experts = relative(s.experts);
  const cell = (rows, loads, what) => (r, c) => "layer " + s.layers[r] + ", " + what + " " + c + "\n" +
    (s.has_load[r] ? rows[r][c].toFixed(3) + " x mean\nload " + big(loads[r][c]) : "no data");
  heatmap($("before"), before, null, rowHeight, cell(before, s.before.ranks, "rank"));
  if (s.after) { const after = relative(s.after.ranks); heatmap($("after"), after, null, rowHeight, cell(after, s.after.ranks, "rank")); }
  const order = byLoad ? experts.map(row => row.map((v, i) => i).sort((a, b) => row[b] - row[a])) : null;
  heatmap($("experts"), experts, order, rowHeight, cell(experts, s.experts, "expert"));
  timeline(); bars();
  $("placementsCard").hidden = !s.placements.length;
  table($("placements"), ["key", "policy", "moves", "before", "predicted", "achieved", "why"], s.placements.map(p =>
    [p.epoch.toString(16) + "/" + p.version, p.policy, big(p.moves), fixed(p.before), fixed(p.predicted), fixed(p.achieved), p.reason]));
  document.body.dataset.layer = s.layers[layer]; document.body.dataset.ready = "1";
}
function choose(index) { source = DATA.sources[index];
  layer = source.before.worst_layer === null ? 0 : Math.max(0, source.layers.indexOf(source.before.worst_layer)); draw(); }
$("pick").replaceChildren(...DATA.sources.map((s, i) => new Option(s.name, i)));
$("pick").hidden = DATA.sources.length < 2; $("pick").onchange = () => choose(+$("pick").value);
for (const [id, value] of [["byId", false], ["byLoad", true]]) $(id).onclick = () => { byLoad = value;
  $("byId").setAttribute("aria-pressed", !value); $("byLoad").setAttribute("aria-pressed", value); draw(); };
addEventListener("resize", draw); choose(0);
"""

_END = "</script></body></html>\n"
