"use strict";
// The page's data and elements. The three scripts run as one, in the order model, draw, act.
//
// What stands in the page: panels, each with parts (schedules on one scale) of rows of spans
// [start, duration, op, name, site, kind], all times in microseconds. Text reaches the page only
// as textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const AXIS = 24, ROW = 26, BAR = 20, PAPER = 840;
const [COMPUTE, COMM] = [data.kinds.indexOf("compute"), data.kinds.indexOf("comm")];
const section = document.getElementById("timelines"), tip = document.getElementById("tip");
// An op's lines of text: a long op has several.
const lines = op => [...document.querySelectorAll(`#text li[data-op="${op}"]`)];
const longest = Math.max(...data.panels.map(panel => panel.makespan), 1e-6);
const shortest = Math.min(...data.panels.map(panel => panel.makespan), longest);
const view = { from: 0, to: 1, same: shortest * 3 > longest, rank: "", paper: false };
const picked = { op: null, at: null, site: null, hover: null, arrows: false, matches: null };
let ink = {};

const make = (tag, parent, text = "", className = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
};
const time = us => us >= 1e5 ? `${(us / 1e3).toFixed(0)} ms` : us >= 1e3 ? `${(us / 1e3).toFixed(2)} ms`
  : us >= 1 ? `${us.toFixed(1)} µs` : us > 0 ? `${(us * 1e3).toFixed(0)} ns` : "0";
const key = (row, span) => `${row.program}:${span[2]}`;
const group = span => span[4] < 0 ? null : data.sites[span[4]].group;

// The panels: labels as elements, spans on a canvas. A part that is compared has a head.
const hint = section.querySelector(".hint");
for (const panel of data.panels) {
  panel.rows = panel.parts.flatMap(part => {
    for (const row of part.rows) row.part = part;
    part.gain = panel.parts[0].makespan / part.makespan;
    const head = { title: part.label, head: true, part, spans: [], rank: null };
    return panel.parts.length > 1 ? [head, ...part.rows] : part.rows;
  });
  const box = document.createElement("div");
  box.className = "panel";
  section.insertBefore(box, hint);
  const heading = make("h2", box, panel.title);
  const parts = panel.parts.map(part => time(part.makespan)).join(" → ");
  const gain = panel.parts.length > 1 ? `, ${panel.parts[1].gain.toFixed(2)}x as fast` : "";
  make("span", heading, parts + gain);
  panel.labels = make("div", box, "", "labels");
  panel.canvas = make("canvas", box);
  panel.canvas.tabIndex = 0;
  panel.canvas.setAttribute("role", "img");
  panel.canvas.setAttribute("aria-label", `${panel.title}: ${parts}${gain}; the tables below have its figures`);
  panel.box = box;
  box.dataset.rows = panel.rows.filter(row => !row.head).length;
  box.dataset.spans = panel.rows.reduce((sum, row) => sum + row.spans.length, 0);
  listen(panel);
}
if (!data.panels.length) make("p", section, "no timeline was given");
const detail = make("div", section);
detail.id = "detail";
detail.hidden = true;

const ranks = [...new Set(data.panels.flatMap(panel => panel.rows.map(row => row.rank)))];
for (const rank of ranks.filter(rank => rank !== null).sort((a, b) => a - b)) {
  make("option", document.getElementById("rank"), `rank ${rank}`).value = rank;
}

function show(rank) {  // the rows of one rank, or of all
  view.rank = document.getElementById("rank").value = rank;
  for (const panel of data.panels) {
    panel.shown = panel.rows.filter(row => row.head || rank === "" || String(row.rank) === rank);
    panel.labels.replaceChildren();
    panel.shown.forEach((row, i) => {
      const next = i > 0 && !row.head && !panel.shown[i - 1].head && panel.shown[i - 1].rank !== row.rank;
      make("div", panel.labels, row.title, row.head ? "head" : next ? "next" : "");
    });
  }
  redraw();
}
