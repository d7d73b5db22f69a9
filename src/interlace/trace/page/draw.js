// Drawing: time to pixels, spans and arrows onto the canvases.

const scale = panel => view.same ? longest : Math.max(panel.makespan, 1e-6);
const x = (panel, us) => (us / scale(panel) - view.from) / (view.to - view.from) * panel.wide;
const INKS = ["ink", "soft", "line", "grid", "accent", "plain", "plain-comm", "quiet", "on", "card", "exposed", "bare"];

function readInk() {
  const style = getComputedStyle(root);
  const get = name => style.getPropertyValue(`--${name}`).trim();
  ink = Object.fromEntries(INKS.map(name => [name, get(name)]));
  ink.sites = Array.from({ length: 10 }, (_, i) => get(`s${i}`));
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = ink.card;
  pen.globalAlpha = 0.28;
  pen.lineWidth = 2.4;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) { pen.moveTo(shift - 1, 9); pen.lineTo(shift + 9, -1); }
  pen.stroke();
  ink.stripes = pen.createPattern(tile, "repeat");
}

function shade(span) {
  if (span[5] === COMPUTE) return ink.plain;
  if (span[5] !== COMM) return ink.quiet;  // a wait is no work of its site
  return span[4] >= 0 ? ink.sites[group(span) % 10] : ink["plain-comm"];
}

function label(pen, row, span, room) {  // module and op, or as much of the module's path as there is room for
  const op = data.names[span[3]].replace(/^aten\.|\.(default|out)$/g, ""), module = moduleOf(row, span);
  const tails = module.split(".").map((_, i, parts) => parts.slice(i).join("."));
  const texts = module ? [`${module} · ${op}`, ...tails] : [op];
  return texts.find(text => pen.measureText(text).width <= room) ?? "";
}

function draw(panel) {
  const { canvas } = panel, dpr = window.devicePixelRatio || 1;
  const wide = panel.wide = view.paper ? PAPER : canvas.clientWidth, high = AXIS + ROW * panel.shown.length + 4;
  canvas.style.height = `${high}px`;
  canvas.width = Math.round(wide * dpr);
  canvas.height = Math.round(high * dpr);
  const pen = canvas.getContext("2d");
  pen.scale(dpr, dpr);
  pen.clearRect(0, 0, wide, high);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  axis(panel, pen, wide, high);
  exposed(panel, pen, wide);
  panel.shown.forEach((row, y) => (row.head ? head : spans)(panel, row, AXIS + y * ROW, pen, wide));
  arrows(panel, pen);
  if (panel.sweep) {
    pen.fillStyle = ink.accent;
    pen.globalAlpha = 0.15;
    pen.fillRect(panel.sweep[0], 0, panel.sweep[1] - panel.sweep[0], high);
    pen.globalAlpha = 1;
  }
}

function axis(panel, pen, wide, high) {
  const shown = (view.to - view.from) * scale(panel), rough = shown / Math.max(wide / 90, 2);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  pen.lineWidth = 1;
  const last = Math.floor(view.to * scale(panel) / step);
  for (let tick = Math.ceil(view.from * scale(panel) / step); tick <= last; tick++) {
    const us = tick * step, at = x(panel, us);
    pen.strokeStyle = ink.grid;
    pen.beginPath();
    pen.moveTo(at, AXIS - 6);
    pen.lineTo(at, high);
    pen.stroke();
    pen.fillStyle = ink.soft;
    if (at + 3 + pen.measureText(time(us)).width <= wide) pen.fillText(time(us), at + 3, 9);
  }
}

function head(panel, row, top, pen, wide) {  // a part's whole length, to compare by eye
  const { part } = row, end = x(panel, part.makespan), start = x(panel, 0);
  const took = time(part.makespan), width = text => pen.measureText(text).width + 12;
  const all = part === panel.parts[0] ? took : `${took} · ${part.gain.toFixed(2)}x as fast`;
  const text = end + width(all) < wide || end > width(all) ? all : took, room = width(text);
  pen.fillStyle = ink.ink;
  pen.fillRect(start, top + 12, end - start, 2);
  pen.fillRect(end - 2, top + 7, 2, 12);
  const right = end + room < wide;
  const at = right ? end + 6 : Math.max(4, Math.min(end, wide) - room);
  if (!right) {
    pen.fillStyle = ink.card;
    pen.fillRect(at - 4, top + 4, room - 2, 18);
    pen.fillStyle = ink.ink;
  }
  pen.fillText(text, at, top + 14);
}

function exposed(panel, pen, wide) {  // behind a rank's rows, and as a line below them
  for (let y = 0; y < panel.shown.length;) {
    const { part, rank, head } = panel.shown[y];
    let end = y + 1;
    while (end < panel.shown.length && panel.shown[end].rank === rank && panel.shown[end].part === part) end++;
    const top = AXIS + y * ROW, bottom = AXIS + end * ROW;
    if (y && !head && !panel.shown[y - 1].head) {
      pen.fillStyle = ink.line;
      pen.fillRect(0, top - 2, wide, 1);
    }
    let drawn = -1;
    for (const [start, length] of head ? [] : part.exposed[rank] ?? []) {
      const left = x(panel, start), right = x(panel, start + length);
      if (left > wide) break;
      if (right <= drawn) continue;
      drawn = Math.max(left, 0) + 1;
      pen.fillStyle = ink.bare;
      pen.fillRect(left, top - 2, right - left, bottom - top);
      pen.fillStyle = ink.exposed;
      pen.fillRect(left, bottom - 5, Math.max(right - left, 1), 3);
    }
    y = end;
  }
}

function spans(panel, row, top, pen, wide) {
  const dims = span => (picked.site !== null && group(span) !== picked.site)
    || (picked.matches !== null && !picked.matches.has(key(row, span)));
  const any = picked.op !== null || picked.hover !== null;
  const some = picked.site !== null || picked.matches !== null;
  let drawn = -1;  // pixels up to here hold a span: many in one pixel are drawn once
  for (let i = first(panel, row); i < row.spans.length; i++) {
    const span = row.spans[i], left = x(panel, span[0]), right = x(panel, span[0] + span[1]);
    if (left > wide) break;
    const chosen = any && [picked.op, picked.hover].includes(key(row, span));
    const dim = some && dims(span);
    if (right <= drawn && !chosen && (dim || !some)) continue;
    const from = Math.max(left, -2), to = Math.min(Math.max(right - 0.5, left + 1), wide + 2);
    const main = span[5] === COMPUTE || span[5] === COMM;
    const [up, tall] = main ? [top, BAR] : [top + 6, 8];
    drawn = Math.max(drawn, from + 1);
    pen.globalAlpha = dim ? 0.18 : main ? 1 : 0.4;
    pen.fillStyle = shade(span);
    pen.fillRect(from, up, to - from, tall);
    if (span[5] === COMPUTE && span[4] >= 0) {
      pen.fillStyle = ink.sites[group(span) % 10];
      pen.fillRect(from, up + tall - 5, to - from, 5);
    }
    if (span[5] === COMM && to - from > 2) {
      pen.fillStyle = ink.stripes;
      pen.fillRect(from, up, to - from, tall);
    }
    pen.globalAlpha = dim ? 0.3 : 1;
    if (main && to - from > 34) {
      pen.save();
      pen.beginPath();
      pen.rect(from, up, to - from - 3, tall);
      pen.clip();
      pen.fillStyle = ink.on;
      pen.fillText(label(pen, row, span, to - from - 8), from + 4, up + tall / 2 - (span[5] === COMPUTE ? 1 : -1));
      pen.restore();
    }
    if (chosen) {
      pen.globalAlpha = 1;
      pen.strokeStyle = ink.ink;
      pen.lineWidth = picked.op === key(row, span) ? 2 : 1;
      pen.strokeRect(from, up + 0.5, Math.max(to - from, 2), tall - 1);
    }
    pen.globalAlpha = 1;
  }
}

function first(panel, row) {  // the first span that may end in sight, by bisection
  let low = 0, high = row.spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x(panel, row.spans[middle][0] + row.spans[middle][1]) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

function links(part) {  // its arrows, from a row and span to another
  if (part.links) return part.links;
  const at = new Map();
  for (const row of part.rows) for (const span of row.spans) at.set(`${row.rank}:${span[2]}`, [row, span]);
  const end = (rank, op) => at.get(`${rank}:${op}`);
  return part.links = part.arrows.map(([kind, , ...ends]) => [kind, end(ends[0], ends[1]), end(ends[2], ends[3])])
    .filter(([, source, target]) => source && target);
}

function arrows(panel, pen) {
  if (!picked.arrows && picked.op === null && picked.hover === null) return;
  for (const [kind, source, target] of panel.parts.flatMap(links)) {
    const near = [source, target].some(end => [picked.op, picked.hover].includes(key(...end)));
    const [from, to] = [source, target].map(([row]) => panel.shown.indexOf(row));
    if ((!picked.arrows && !near) || from < 0 || to < 0) continue;
    const ax = x(panel, source[1][0] + source[1][1]), ay = AXIS + from * ROW + BAR / 2;
    const bx = x(panel, target[1][0] + target[1][1]), by = AXIS + to * ROW + BAR / 2;
    pen.strokeStyle = pen.fillStyle = kind === "event" ? ink.accent : ink.ink;
    pen.globalAlpha = near ? 1 : 0.35;
    pen.lineWidth = 1.3;
    pen.beginPath();
    pen.moveTo(ax, ay);
    const bend = Math.max(12, Math.abs(bx - ax) / 3);
    pen.bezierCurveTo(ax + bend, ay, bx - bend, by, bx, by);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(bx, by);
    pen.lineTo(bx - 6, by - 3.5);
    pen.lineTo(bx - 6, by + 3.5);
    pen.fill();
    pen.globalAlpha = 1;
  }
}

let asked = true;  // the first time all is drawn at once, at the end of the script
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; data.panels.forEach(draw); });
}

