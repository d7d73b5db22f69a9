"use strict";
// The page's data and elements. The three scripts run as one, in the order model, draw, act.
//
// What stands in the page: panels of rows of spans [start, duration, op, name, site, kind], all
// times in microseconds. Text reaches the page only as textContent.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const AXIS = 24, ROW = 26, BAR = 20;
const [COMPUTE, COMM] = [data.kinds.indexOf("compute"), data.kinds.indexOf("comm")];
const section = document.getElementById("timelines"), tip = document.getElementById("tip");
// An op's lines of text: a long op has several.
const lines = new Map();
for (const li of document.querySelectorAll("#text li[data-op]")) {
  lines.set(li.dataset.op, [...(lines.get(li.dataset.op) ?? []), li]);
}
const longest = Math.max(...data.panels.map(panel => panel.makespan), 1e-6);
const shortest = Math.min(...data.panels.map(panel => panel.makespan), longest);
const view = { from: 0, to: 1, same: shortest * 3 > longest };
const picked = { op: null, site: null, hover: null, arrows: false };
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

// The panels: labels as elements, spans on a canvas.
const hint = section.querySelector(".hint");
for (const panel of data.panels) {
  const box = document.createElement("div");
  box.className = "panel";
  section.insertBefore(box, hint);
  const heading = make("h2", box, panel.title);
  make("span", heading, time(panel.makespan));
  const labels = make("div", box, "", "labels");
  panel.rows.forEach((row, i) => {
    const next = i > 0 && panel.rows[i - 1].rank !== row.rank;
    make("div", labels, row.title, next ? "next" : "");
  });
  panel.canvas = make("canvas", box);
  panel.canvas.tabIndex = 0;
  panel.canvas.setAttribute("role", "img");
  panel.canvas.setAttribute("aria-label", `${panel.title}: ${panel.rows.length} rows`);
  panel.box = box;
  panel.at = new Map();
  panel.rows.forEach((row, y) => row.spans.forEach(span => {
    const place = `${row.rank}:${span[2]}`;
    if (!panel.at.has(place)) panel.at.set(place, [y, span]);
  }));
  box.dataset.rows = panel.rows.length;
  box.dataset.spans = panel.rows.reduce((sum, row) => sum + row.spans.length, 0);
  listen(panel);
}
if (!data.panels.length) hint.textContent = "no timeline was given";
const detail = make("div", section);
detail.id = "detail";
detail.hidden = true;

