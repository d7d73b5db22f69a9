// Pointing, zooming and picking.

function under(panel, event) {
  const area = panel.canvas.getBoundingClientRect();
  const px = event.clientX - area.left, py = event.clientY - area.top - AXIS;
  const row = panel.shown[Math.floor(py / ROW)];
  if (!row || py < 0) return null;
  let best = null;
  for (let i = first(panel, row); i < row.spans.length; i++) {
    const span = row.spans[i], left = x(panel, span[0]), right = x(panel, span[0] + span[1]);
    if (left > px + 2) break;
    if (px <= Math.max(right, left + 2)) best = span;
  }
  return best && [row, best];
}

function zoom(factor, middle = 0.5) {
  const at = view.from + middle * (view.to - view.from);
  const span = Math.min(1, Math.max(1e-7, (view.to - view.from) * factor));
  move(at - middle * span, span);
}
function move(from, span = view.to - view.from) {
  view.from = Math.min(Math.max(from, 0), 1 - span);
  view.to = view.from + span;
  redraw();
}

function listen(panel) {
  const { canvas } = panel;
  let drag = null;
  const part = event => (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth;
  canvas.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) zoom(1.0015 ** event.deltaY, part(event));
    else if (event.deltaX || event.shiftKey) {
      move(view.from + (event.deltaX || event.deltaY) / canvas.clientWidth * (view.to - view.from));
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => {
    drag = { at: part(event), from: view.from, moved: false, sweep: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!drag) return point(panel, event);
    const by = part(event) - drag.at;
    drag.moved ||= Math.abs(by) * canvas.clientWidth > 3;
    if (drag.sweep) {
      panel.sweep = [Math.min(part(event), drag.at), Math.max(part(event), drag.at)].map(p => p * canvas.clientWidth);
      redraw();
    } else if (drag.moved) move(drag.from - by * (view.to - view.from));
  });
  canvas.addEventListener("pointerup", event => {
    if (drag && panel.sweep) {
      const [left, right] = panel.sweep.map(p => view.from + p / canvas.clientWidth * (view.to - view.from));
      panel.sweep = null;
      if (drag.moved) move(left, Math.max(right - left, 1e-7));
    } else if (drag && !drag.moved) {
      const found = under(panel, event);
      pick(found && key(...found) !== picked.op ? key(...found) : null, found && [panel, ...found]);
    }
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; picked.hover = null; redraw(); });
  canvas.addEventListener("dblclick", () => move(0, 1));
}

function describe(parent, row, span, panel) {
  const text = lines(key(row, span)).map(li => li.textContent.trim()).join(" ")
    .replace(/([([]) /g, "$1").replace(/,? ([)\]])/g, "$1");  // in one line
  const site = data.sites[span[4]];
  make("code", make("p", parent), text || data.names[span[3]]);
  const where = place(row, span);
  if (where) make("p", parent, where, "soft");
  if (site) make("p", parent, `site ${site.id} · ${[site.module, site.kind, site.strategy].filter(Boolean).join(" · ")}`);
  if (panel) make("p", parent, `${row.title} · ${data.kinds[span[5]]} · ${time(span[1])} from ${time(span[0])}`, "soft");
}

function point(panel, event) {
  const found = under(panel, event);
  const hover = found ? key(...found) : null;
  if (hover !== picked.hover || tip.hidden) {
    picked.hover = hover;
    tip.hidden = !found;
    tip.replaceChildren();
    if (found) describe(tip, ...found, panel);
    redraw();
  }
  if (!found) return;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
}

const moduleOf = (row, span) => data.names[data.modules[row.program]?.[span[2]]] || data.sites[span[4]]?.module || "";
const place = (row, span) => row.program >= 0 ? data.names[data.locs[row.program][span[2]]] ?? "" : "";

function* all(panels = data.panels) {  // [panel, row, span] of every span in sight
  for (const panel of panels) for (const row of panel.shown) for (const span of row.spans) yield [panel, row, span];
}

function pick(op, at = null) {  // `at`: the panel, row and span that stand for it
  for (const li of document.querySelectorAll("#text li.picked")) li.classList.remove("picked");
  picked.op = op;
  picked.at = at;
  detail.replaceChildren();
  detail.hidden = op === null;
  if (op !== null) {
    const own = lines(op), times = [];
    own.forEach(li => li.classList.add("picked"));
    if (at && own.length) reveal(own[0]);
    for (const [panel, row, span] of all()) {
      if (key(row, span) !== op) continue;
      picked.at ??= [panel, row, span];
      times.push(`${panel.run} ${panel.source} rank ${row.rank}: ${time(span[1])}`.trim());
    }
    if (picked.at) describe(detail, ...picked.at.slice(1), null);
    make("p", detail, times.join(" · ") || "this op has no span", "soft");
  }
  redraw();
}

function step(by) {  // the next op of the row, or of what a search found
  const { matches, at } = picked;
  let listed = [...all()].filter(([, row, span]) => matches === null || matches.has(key(row, span)));
  const row = at ? at[1] : listed[0]?.[1];
  if (matches === null) listed = listed.filter(found => found[1] === row);
  if (!listed.length) return;
  const now = at ? listed.findIndex(found => found[2] === at[2]) : -1;
  const next = listed[now < 0 ? (by > 0 ? 0 : listed.length - 1) : (now + by + listed.length) % listed.length];
  const [panel, , span] = next, start = span[0] / scale(panel), end = (span[0] + span[1]) / scale(panel);
  if (start < view.from || end > view.to) move((start + end - view.to + view.from) / 2);
  panel.box.scrollIntoView({ block: "nearest" });
  pick(key(next[1], span), next);
}

let texts = null;  // what a search looks at, by op; made by the first search
function search(words) {
  if (texts === null) {
    texts = new Map();
    for (const [, row, span] of all()) {
      const site = data.sites[span[4]];
      const said = [data.names[span[3]], place(row, span), site?.module, site?.kind, site?.strategy];
      if (!texts.has(key(row, span))) texts.set(key(row, span), said.join(" ").toLowerCase());
    }
    for (const li of document.querySelectorAll("#text li[data-op]")) {
      texts.set(li.dataset.op, `${texts.get(li.dataset.op) ?? ""} ${li.textContent.trim().toLowerCase()}`);
    }
  }
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...texts].filter(([, text]) => wanted.every(word => text.includes(word)));
  picked.matches = wanted.length ? new Set(found.map(([op]) => op)) : null;
  document.getElementById("found").textContent = wanted.length ? `${found.length} of ${texts.size} ops` : "";
  for (const li of document.querySelectorAll("#text li[data-op]")) {
    li.classList.toggle("found", picked.matches?.has(li.dataset.op) ?? false);
  }
  redraw();
}

function reveal(line) {
  const area = document.getElementById("text");
  line.closest("details").open = true;
  const top = line.getBoundingClientRect().top - area.getBoundingClientRect().top;
  if (top < 40 || top > area.clientHeight - 40) area.scrollTop += top - area.clientHeight / 2;
}

function pickSite(tr) {
  const [program, id] = tr.dataset.site.split(":").map(Number);
  const site = data.sites.find(site => site.program === program && site.id === id);
  picked.site = picked.site === site.group ? null : site.group;
  for (const other of document.querySelectorAll("#sites tbody tr")) {
    other.classList.toggle("picked", other === tr && picked.site !== null);
  }
  redraw();
}

const on = (id, name, act) => document.getElementById(id).addEventListener(name, act);
on("text", "click", event => {
  const op = event.target.closest("li[data-op]")?.dataset.op;
  if (op) pick(op === picked.op ? null : op);
});
for (const tr of document.querySelectorAll("#sites tbody tr")) {
  tr.addEventListener("click", () => pickSite(tr));
  tr.addEventListener("keydown", event => { if (event.key === "Enter") pickSite(tr); });
}
on("zoom-in", "click", () => zoom(0.6));
on("zoom-out", "click", () => zoom(1 / 0.6));
on("fit", "click", () => move(0, 1));
on("theme", "click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
const same = document.getElementById("same-scale"), every = document.getElementById("all-arrows");
const find = document.getElementById("find");
same.checked = view.same;
same.addEventListener("change", () => { view.same = same.checked; redraw(); });
every.addEventListener("change", () => { picked.arrows = every.checked; redraw(); });
find.addEventListener("input", () => search(find.value));
find.addEventListener("keydown", event => { if (event.key === "Enter") step(event.shiftKey ? -1 : 1); });
on("rank", "change", event => { pick(null); texts = null; show(event.target.value); search(find.value); });
function clear() {
  find.value = "";
  search("");
  pick(null);
  picked.site = null;
  document.querySelector("#sites tr.picked")?.classList.remove("picked");
}
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  tip.hidden = true;
  if (event.key === "Escape") { clear(); event.target.blur(); return; }
  if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
  const part = (view.to - view.from) * 0.1;
  const act = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => move(0, 1),
    w: () => zoom(0.6), s: () => zoom(1 / 0.6), a: () => move(view.from - part), d: () => move(view.from + part),
    ArrowLeft: () => move(view.from - part), ArrowRight: () => move(view.from + part),
    n: () => step(1), p: () => step(-1), "/": () => find.focus(),
  }[event.key];
  if (act) { act(); if (event.key.startsWith("Arrow") || event.key === "/") event.preventDefault(); }
});
addEventListener("resize", redraw);

const paper = matchMedia("print");
paper.addEventListener("change", () => {
  view.paper = paper.matches;
  readInk();
  data.panels.forEach(draw);
});
function setTheme(theme) {
  root.dataset.theme = theme;
  readInk();
  redraw();
}
// A link may choose: page.html#theme=dark&op=0:12&from=0.2&to=0.4&arrows=1&rank=0&find=all_gather
const asks = new URLSearchParams(location.hash.slice(1));
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
show(asks.get("rank") ?? "");
setTheme(asks.get("theme") === "dark" || (!asks.has("theme") && dark.matches) ? "dark" : "light");
if (asks.has("arrows")) every.checked = picked.arrows = true;
if (asks.has("op")) {
  const op = asks.get("op"), at = [...all()].find(([, row, span]) => key(row, span) === op);
  pick(op, at);
  if (!at) lines(op).slice(0, 1).forEach(reveal);
}
if (asks.has("from")) move(Number(asks.get("from")), Math.max(Number(asks.get("to") || 1) - Number(asks.get("from")), 1e-7));
if (asks.has("find")) search(find.value = asks.get("find"));
data.panels.forEach(draw);
asked = false;
root.dataset.took = Math.round(performance.now());
root.dataset.ready = "yes";
