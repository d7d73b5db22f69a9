// Pointing, zooming and picking.

function under(panel, event) {
  const area = panel.canvas.getBoundingClientRect();
  const px = event.clientX - area.left, py = event.clientY - area.top - AXIS;
  const row = panel.rows[Math.floor(py / ROW)];
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
      pick(found ? key(...found) : null, true);
    }
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; picked.hover = null; redraw(); });
  canvas.addEventListener("dblclick", () => move(0, 1));
}

function describe(parent, row, span, panel) {
  const text = lines.get(key(row, span))?.map(li => li.textContent.trim()).join(" ");
  const site = data.sites[span[4]];
  make("code", make("p", parent), text ?? data.names[span[3]]);
  const where = row.program >= 0 ? data.locs[row.program][span[2]] : "";
  if (where) make("p", parent, where, "soft");
  if (site) make("p", parent, `site ${site.id} · ${[site.module, site.kind, site.strategy].filter(Boolean).join(" · ")}`);
  if (panel) make("p", parent, `${row.title} · ${data.kinds[span[5]]} · ${time(span[1])} from ${time(span[0])}`, "soft");
}

function point(panel, event) {
  const found = under(panel, event);
  const hover = found ? key(...found) : null;
  if (hover !== picked.hover) { picked.hover = hover; redraw(); }
  tip.hidden = !found;
  if (!found) return;
  tip.replaceChildren();
  describe(tip, ...found, panel);
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
}

function pick(op, scroll) {
  lines.get(picked.op)?.forEach(li => li.classList.remove("picked"));
  picked.op = op === picked.op ? null : op;
  detail.replaceChildren();
  detail.hidden = picked.op === null;
  if (picked.op !== null) {
    const own = lines.get(picked.op) ?? [];
    own.forEach(li => li.classList.add("picked"));
    if (scroll && own.length) reveal(own[0]);
    const times = [];
    let shown = null;
    for (const panel of data.panels) for (const row of panel.rows) for (const span of row.spans) {
      if (key(row, span) !== picked.op) continue;
      shown ||= [row, span];
      times.push(`${panel.source} rank ${row.rank}: ${time(span[1])}`);
    }
    if (shown) describe(detail, ...shown, null);
    make("p", detail, times.join(" · ") || "this op has no span", "soft");
  }
  redraw();
}

function reveal(line) {
  const area = document.getElementById("text");
  const top = line.offsetTop - area.offsetTop;
  if (top < area.scrollTop + 40 || top > area.scrollTop + area.clientHeight - 40) {
    area.scrollTop = top - area.clientHeight / 2;
  }
}

function pickSite(tr) {
  const [program, id] = tr.dataset.site.split(":").map(Number);
  const place = data.sites.findIndex(site => site.program === program && site.id === id);
  picked.site = picked.site === place ? null : place;
  for (const other of document.querySelectorAll("#sites tbody tr")) {
    other.classList.toggle("picked", other === tr && picked.site !== null);
  }
  redraw();
}

lines.forEach((own, op) => own.forEach(li => li.addEventListener("click", () => pick(op, false))));
for (const tr of document.querySelectorAll("#sites tbody tr")) {
  tr.addEventListener("click", () => pickSite(tr));
  tr.addEventListener("keydown", event => { if (event.key === "Enter") pickSite(tr); });
}
const on = (id, act) => document.getElementById(id).addEventListener("click", act);
on("zoom-in", () => zoom(0.6));
on("zoom-out", () => zoom(1 / 0.6));
on("fit", () => move(0, 1));
on("theme", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
const same = document.getElementById("same-scale"), all = document.getElementById("all-arrows");
same.checked = view.same;
same.addEventListener("change", () => { view.same = same.checked; redraw(); });
all.addEventListener("change", () => { picked.arrows = all.checked; redraw(); });
addEventListener("keydown", event => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const step = (view.to - view.from) * 0.1;
  const act = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => move(0, 1),
    w: () => zoom(0.6), s: () => zoom(1 / 0.6), a: () => move(view.from - step), d: () => move(view.from + step),
    ArrowLeft: () => move(view.from - step), ArrowRight: () => move(view.from + step), Escape: () => pick(null),
  }[event.key];
  if (act) { act(); if (event.key.startsWith("Arrow")) event.preventDefault(); }
});
addEventListener("resize", redraw);

function setTheme(theme) {
  root.dataset.theme = theme;
  readInk();
  redraw();
}
// A link may choose: page.html#theme=dark&op=0:12&from=0.2&to=0.4&arrows=1
const asks = new URLSearchParams(location.hash.slice(1));
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
setTheme(asks.get("theme") === "dark" || (!asks.has("theme") && dark.matches) ? "dark" : "light");
if (asks.has("arrows")) all.checked = picked.arrows = true;
if (asks.has("op")) pick(asks.get("op"), true);
if (asks.has("from")) move(Number(asks.get("from")), Math.max(Number(asks.get("to") || 1) - Number(asks.get("from")), 1e-7));
data.panels.forEach(draw);
root.dataset.ready = "yes";
