// Drawing: time to pixels, spans and arrows onto the canvases.

const scale = panel => view.same ? longest : Math.max(panel.makespan, 1e-6);
const width = panel => panel.canvas.clientWidth;
const x = (panel, us) => (us / scale(panel) - view.from) / (view.to - view.from) * width(panel);

function readInk() {
  const style = getComputedStyle(root);
  const get = name => style.getPropertyValue(`--${name}`).trim();
  ink = { sites: [] };
  for (const name of ["ink", "soft", "line", "grid", "accent", "plain", "plain-comm", "quiet", "on", "card"]) {
    ink[name] = get(name);
  }
  for (let i = 0; i < 10; i++) ink.sites.push(get(`s${i}`));
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
  const colour = where => {
    const [program, id] = where.split(":").map(Number);
    return data.sites.findIndex(site => site.program === program && site.id === id);
  };
  for (const element of document.querySelectorAll("[data-site]")) {
    const place = colour(element.dataset.site);
    const shade = place < 0 ? "transparent" : ink.sites[place % 10];
    if (element.tagName === "LI") element.style.borderLeftColor = shade;
    else {
      const cell = element.cells[0];
      (cell.firstElementChild || make("i", cell)).style.background = shade;
    }
  }
}

function shade(span) {
  if (span[5] !== COMPUTE && span[5] !== COMM) return ink.quiet;  // a wait is no work of its site
  if (span[4] >= 0) return ink.sites[span[4] % 10];
  return span[5] === COMM ? ink["plain-comm"] : ink.plain;
}

function draw(panel) {
  const { canvas } = panel, dpr = window.devicePixelRatio || 1;
  const wide = width(panel), high = AXIS + ROW * panel.rows.length + 4;
  canvas.style.height = `${high}px`;
  canvas.width = Math.round(wide * dpr);
  canvas.height = Math.round(high * dpr);
  const pen = canvas.getContext("2d");
  pen.scale(dpr, dpr);
  pen.clearRect(0, 0, wide, high);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  axis(panel, pen, wide, high);
  panel.rows.forEach((row, y) => spans(panel, row, AXIS + y * ROW, pen, wide));
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
    pen.fillText(time(us), at + 3, 9);
  }
  panel.rows.forEach((row, y) => {
    if (y && panel.rows[y - 1].rank !== row.rank) {
      pen.strokeStyle = ink.line;
      pen.beginPath();
      pen.moveTo(0, AXIS + y * ROW - 2);
      pen.lineTo(wide, AXIS + y * ROW - 2);
      pen.stroke();
    }
  });
}

function spans(panel, row, top, pen, wide) {
  const dim = picked.site !== null;
  let drawn = -1;  // pixels up to here hold a span: many in one pixel are drawn once
  for (let i = first(panel, row); i < row.spans.length; i++) {
    const span = row.spans[i], left = x(panel, span[0]), right = x(panel, span[0] + span[1]);
    if (left > wide) break;
    const chosen = picked.op === key(row, span) || picked.hover === key(row, span);
    if (right <= drawn && !chosen) continue;
    const from = Math.max(left, -2), to = Math.min(Math.max(right - 0.5, left + 1), wide + 2);
    const main = span[5] === COMPUTE || span[5] === COMM;
    const [up, tall] = main ? [top, BAR] : [top + 6, 8];
    drawn = Math.max(drawn, from + 1);
    pen.globalAlpha = dim && span[4] !== picked.site ? 0.18 : main ? 1 : 0.4;
    pen.fillStyle = shade(span);
    pen.fillRect(from, up, to - from, tall);
    if (span[5] === COMM && to - from > 2) {
      pen.fillStyle = ink.stripes;
      pen.fillRect(from, up, to - from, tall);
    }
    pen.globalAlpha = dim && span[4] !== picked.site ? 0.3 : 1;
    if (main && to - from > 34) {
      pen.save();
      pen.beginPath();
      pen.rect(from, up, to - from - 3, tall);
      pen.clip();
      pen.fillStyle = ink.on;
      pen.fillText(data.names[span[3]].replace(/^aten\./, ""), from + 4, up + tall / 2 + 1);
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

function arrows(panel, pen) {
  const program = new Map(panel.rows.map(row => [row.rank, row.program]));
  for (const [kind, , fromRank, fromOp, toRank, toOp] of panel.arrows) {
    const ends = [`${program.get(fromRank)}:${fromOp}`, `${program.get(toRank)}:${toOp}`];
    const near = ends.some(end => end === picked.op || end === picked.hover);
    if (!picked.arrows && !near) continue;
    const source = panel.at.get(`${fromRank}:${fromOp}`), target = panel.at.get(`${toRank}:${toOp}`);
    if (!source || !target) continue;
    const ax = x(panel, source[1][0] + source[1][1]), ay = AXIS + source[0] * ROW + BAR / 2;
    const bx = x(panel, target[1][0] + target[1][1]), by = AXIS + target[0] * ROW + BAR / 2;
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

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; data.panels.forEach(draw); });
}

