"use strict";
// All strings come from records: they reach the page as textContent alone, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const NAMES = ["platform", "backend", "format", "kernel", "case", "outcome", "verdict", "experiment", "reasons", "shown", "excused"]; // numbers into the list of strings
const WIDTH = " ±"; // what the half width of a measure's interval is called
const measure = (name) => `measure ${name}`; // a field that no name above is
const FIELDS = [...NAMES, ...data.measures.flatMap(([name, , , estimated]) =>
  (estimated ? [measure(name), measure(name) + WIDTH] : [measure(name)]))];
const cells = data.cells.map((row) => Object.fromEntries(FIELDS.map((field, at) =>
  [field, at < NAMES.length ? data.strings[row[at]] : row[at]])));
// The number that colours a cell, of the measure that its experiment names.
for (const cell of cells) cell.heat = cell[measure(data.heats[cell.experiment])] ?? null;

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const sign = (x, digits) => (x === null ? "" : (x < 0 ? "" : "+") + x.toFixed(digits));

// Blue to white to orange: told apart with every common kind of colour blindness; its lightness alone tells the size.
const ENDS = { low: [5, 72, 138], high: [166, 54, 3] };
function colour(bias) {
  const share = Math.min(1, Math.abs(bias) / data.scale);
  const end = bias < 0 ? ENDS.low : ENDS.high;
  return end.map((channel) => Math.round(255 + (channel - 255) * share));
}
function luminance(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function paint(element, bias) {
  const rgb = colour(bias);
  element.style.background = `rgb(${rgb})`;
  element.style.color = luminance(rgb) > 0.179 ? "#000" : "#fff"; // where black and white have the same contrast
}

function shown(cell) {
  if (cell.excused) return `(${cell.shown})`;
  return cell.shown + ({ fell: "!", inconclusive: "?", held: " ·" }[cell.outcome] || "");
}

const digits = (x) => (Number.isInteger(x) ? String(x) : Math.abs(x) >= 1e-3 ? x.toFixed(5).replace(/0+$/, "") : x.toExponential(2));

function details(cell) {
  const lines = [`${cell.kernel}, ${cell.case}`, `${cell.platform}, ${cell.backend}, ${cell.format}`,
    [cell.outcome, cell.verdict, cell.excused && `excused: ${cell.excused}`].filter(Boolean).join(", ")];
  for (const [name, unit] of data.measures) {
    const [number, half] = [cell[measure(name)], cell[measure(name) + WIDTH] ?? null];
    if (number === null) continue;
    lines.push(`${name} ${digits(number)}${half === null ? "" : ` ± ${digits(half)}`} ${unit}`.trim());
  }
  return lines.concat(cell.reasons || []).join("\n");
}

function heatCell(cell) {
  if (!cell) return make("td", "missing", { class: "none" });
  const nan = cell.verdict === "nonfinite";
  const kind = nan ? "nan" : cell.heat === null ? "none" : cell.verdict ? "" : "unjudged";
  const outcome = cell.excused ? "excused" : cell.outcome;
  const element = make("td", shown(cell), { class: `${kind} ${outcome}`.trim() });
  if (cell.heat !== null && !nan && cell.verdict) paint(element, cell.heat);
  element.cell = cell;
  return element;
}

function heatMap(group, title) {
  const kernels = [...new Set(group.map((cell) => cell.kernel))];
  const cases = [...new Set(group.map((cell) => cell.case))];
  const found = new Map(group.map((cell) => [JSON.stringify([cell.kernel, cell.case]), cell]));
  const table = make("table", null, { class: "heat", "aria-label": title });
  const head = table.createTHead().insertRow();
  head.append(make("th", "case", { scope: "col" }));
  for (const kernel of kernels) {
    const th = make("th", null, { scope: "col" });
    th.append(make("div", kernel));
    head.append(th);
  }
  const body = table.createTBody();
  for (const name of cases) {
    const row = body.insertRow();
    const th = make("th", null, { scope: "row" });
    th.append(make("div", name));
    row.append(th);
    for (const kernel of kernels) row.append(heatCell(found.get(JSON.stringify([kernel, name]))));
  }
  return table;
}

function heatMaps() {
  const groups = new Map();
  const several = new Set(cells.map((cell) => cell.experiment)).size > 1;
  for (const cell of cells) {
    const title = `${cell.platform}: ${cell.backend}, ${cell.format}${several ? `, ${cell.experiment}` : ""}`;
    if (!groups.has(title)) groups.set(title, []);
    groups.get(title).push(cell);
  }
  let drawn = 0;
  for (const [title, group] of groups) {
    const panel = make("details");
    panel.append(make("summary", `${title} (${group.length} cells)`));
    // A map is drawn when it is opened: fifty thousand cells at once would keep the page waiting.
    panel.addEventListener("toggle", () => {
      if (!panel.open || panel.querySelector("table")) return;
      const wide = make("div", null, { class: "wide", tabindex: "0", role: "region", "aria-label": `heat map, ${title}` });
      wide.append(heatMap(group, title));
      panel.append(wide);
    });
    document.getElementById("maps").append(panel);
    panel.open = drawn === 0 || drawn + group.length < 6000;
    if (panel.open) drawn += group.length;
  }
}

function tooltip() {
  const tip = document.getElementById("tip");
  document.getElementById("maps").addEventListener("mouseover", (event) => {
    const cell = event.target.cell;
    tip.hidden = !cell;
    if (!cell) return;
    tip.textContent = details(cell);
    const box = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
    const below = box.bottom + 6;
    tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : Math.max(4, box.top - tip.offsetHeight - 6)}px`;
  });
  document.getElementById("maps").addEventListener("mouseleave", () => { tip.hidden = true; });
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
}

const COLUMNS = [["kernel"], ["case"], ["outcome"], ["verdict"],
  ...data.measures.flatMap(([name, unit, , estimated]) => [[measure(name), unit && !name.includes(unit) ? `${name}, ${unit}` : name, digits],
    ...(estimated ? [[measure(name) + WIDTH, "±", digits]] : [])]),
  ["platform"], ["backend"], ["format"], ["reasons", "why"]];
const PAGE = 200;
const view = { sort: null, down: false, limit: PAGE };

function compare(a, b) {
  const [x, y] = [a[view.sort], b[view.sort]];
  const [noX, noY] = [x === null || x === "", y === null || y === ""];
  if (noX || noY) return noX - noY; // what is missing comes last, whichever way
  const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
  return view.down ? -order : order;
}

function refresh() {
  const words = document.getElementById("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [platform, outcome] = ["platform", "outcome"].map((name) => document.getElementById(name).value);
  let found = cells.filter((cell) => (!platform || cell.platform === platform) && (!outcome || cell.outcome === outcome) &&
    words.every((word) => `${cell.backend} ${cell.kernel} ${cell.case} ${cell.format} ${cell.verdict}`.toLowerCase().includes(word)));
  if (view.sort) found = [...found].sort(compare);
  const body = document.querySelector("#cells tbody");
  body.replaceChildren(...found.slice(0, view.limit).map((cell) => {
    const row = make("tr");
    for (const [field, , format] of COLUMNS) {
      const value = cell[field];
      row.append(make("td", value === null ? "" : format ? format(value) : value, format ? { class: "number" } : {}));
    }
    return row;
  }));
  const count = Math.min(found.length, view.limit);
  document.getElementById("count").textContent = `${count} of ${found.length} cells that fit; ${cells.length} in all`;
  document.getElementById("more").hidden = count === found.length;
}

function heads() {
  const row = document.querySelector("#cells thead tr");
  for (const [field, title] of COLUMNS) {
    const th = make("th", null, { scope: "col", "aria-sort": "none" });
    const button = make("button", title || field, { type: "button" });
    button.addEventListener("click", () => {
      view.down = view.sort === field && !view.down;
      view.sort = field;
      for (const other of row.cells) other.setAttribute("aria-sort", "none");
      th.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      refresh();
    });
    th.append(button);
    row.append(th);
  }
}

function filters() {
  for (const name of ["platform", "outcome"]) {
    const select = document.getElementById(name);
    for (const value of new Set(cells.map((cell) => cell[name]))) select.append(make("option", value, { value }));
    select.addEventListener("change", renew);
  }
  document.getElementById("words").addEventListener("input", renew);
  document.getElementById("more").addEventListener("click", () => { view.limit += 5 * PAGE; refresh(); });
  document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
}
function renew() {
  view.limit = PAGE;
  refresh();
}

heatMaps();
tooltip();
heads();
filters();
refresh();
document.body.dataset.ready = "true";
