// The data, and what is shared by the map, the panel and the table of all cells.
// All strings come from records: they reach the page as textContent or as an attribute's value, never as HTML.
const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const data = await new Response(unpacked).json();
const { cases, measures, platforms } = data;
const [MISSING, DIFFERENT, OTHER_INPUTS] = ["missing", "!", "/"];

const measureNamed = new Map(measures.map((one) => [one.name, one]));
const measuresOf = (record) =>
  new Map(record.measures.map(([name, value, half]) => [measureNamed.get(name), { value, half }]));

const cells = data.cells.map((cell) => {
  // A number is that of an earlier platform that says the same.
  const said = cell.records.map((one) => (typeof one === "number" ? cell.records[one] : one));
  cell.same = cell.records.map((one, number) => (typeof one === "number" ? one : number));
  cell.records = said.map((one) => one && { ...one, cell });
  cell.case = cases[cell.place];
  cell.column = JSON.stringify([cell.backend, cell.format, cell.kernel]);
  cell.differs = cell.agreement === DIFFERENT;
  const words = said.flatMap((one) => (one ? [one.outcome, one.verdict] : []));
  cell.words = [cell.backend, cell.kernel, cell.case.name, cell.case.group, cell.format, ...new Set(words)]
    .join(" ").toLowerCase();
  return cell;
});

function make(tag, text, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const digits = (x) => {
  if (Number.isInteger(x)) return x.toLocaleString("en-US");
  return Math.abs(x) >= 1e-3 ? String(+x.toFixed(5)) : x.toExponential(2);
};
const estimate = ({ value, half }) => (value === null ? "" : digits(value) + (half === null ? "" : ` ± ${digits(half)}`));
const withUnit = ({ name, unit }) => (unit && !name.includes(unit) ? `${name}, ${unit}` : name);

// Away from zero or toward it, in steps that a reader tells apart.
const STEPS = [0.05, 0.1, 0.15, 0.2, 0.3];
function tint(record) {
  if (record.verdict === "nonfinite") return "nan";
  if (record.outcome === "skipped") return "none";
  if (["crashed", "timed_out"].includes(record.outcome)) return "ended";
  if (record.tone === null) return "plain";
  const step = STEPS.filter((edge) => Math.abs(record.tone) >= edge).length;
  return step ? `${record.tone < 0 ? "toward" : "away"}-${step}` : "";
}
const passes = (record) => ["held", "measured", "skipped"].includes(record.outcome) || Boolean(record.excused);
const mark = (record) => (record.excused ? "excused" : record.outcome);
const classes = (record) => `${tint(record)} ${mark(record)}`.trim();

const VERDICTS = { biased: "biased", unbiased: "unbiased", undecided: "not known whether biased",
  nonfinite: "NaN or Inf where the reference is finite" };
const spoken = (record) => (record
  ? [record.text, VERDICTS[record.verdict], record.excused ? "failed, excused" : record.outcome.replace("_", " ")]
    .filter(Boolean).join(", ")
  : MISSING);

// The filters, which the maps and the table share.
const control = (name) => document.getElementById(name);
const seen = (cell) => { // the records that the chosen platform has, or all
  const chosen = control("platform").value;
  return chosen === "" ? cell.records : [cell.records[Number(chosen)]];
};

function chosenCells() {
  const words = control("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [outcome, differing, failures] = [control("outcome").value, control("differing").checked, control("failures").checked];
  return cells.filter((cell) => seen(cell).some((one) => one && (!outcome || one.outcome === outcome)) &&
    (!differing || cell.differs) && (!failures || cell.case.failure) && words.every((word) => cell.words.includes(word)));
}

// The table of all cells: a row for every platform's record.
const PAGE = 200;
const shownMeasures = measures.filter((measure) => measure.column);
const COLUMNS = [
  { title: "kernel", of: (one) => one.cell.kernel },
  { title: "case", of: (one) => one.cell.case.name },
  { title: "shown", of: (one) => one.text },
  { title: "outcome", of: (one) => one.outcome },
  { title: "verdict", of: (one) => one.verdict },
  ...shownMeasures.map((measure) => ({ title: withUnit(measure), about: measure.about, number: true,
    of: (one) => one.measured.get(measure) })),
  { title: "backend", of: (one) => `${one.cell.backend}, ${one.cell.format}` },
  { title: "platform", of: (one) => String(one.platform + 1), about: "its number in the list above" },
];
const view = { sort: null, down: false, limit: PAGE };

function compare(a, b) {
  const [x, y] = [a, b].map((one) => { const found = view.sort.of(one); return view.sort.number ? found?.value ?? null : found; });
  const [noX, noY] = [x === null || x === "", y === null || y === ""];
  if (noX || noY) return noX - noY; // what is missing comes last, whichever way
  const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
  return view.down ? -order : order;
}

function rowOf(one) {
  const row = make("tr");
  for (const { of, number } of COLUMNS) {
    const found = of(one);
    row.append(number ? make("td", found ? estimate(found) : "", { class: "number" }) : make("td", found));
  }
  row.cells[2].className = classes(one);
  row.lastChild.title = platforms[one.platform].label;
  row.cell = one.cell;
  return row;
}

function fillTable(chosen) {
  const outcome = control("outcome").value;
  let found = chosen.flatMap((cell) => cell.records.map((one, platform) => one && { ...one, platform }))
    .filter((one) => one && seen(one.cell).includes(one.cell.records[one.platform]) && (!outcome || one.outcome === outcome));
  if (control("platform").value !== "") found = found.filter((one) => one.platform === Number(control("platform").value));
  const all = cells.reduce((sum, cell) => sum + cell.records.filter(Boolean).length, 0);
  if (view.sort?.number) for (const one of found) one.measured = measuresOf(one);
  if (view.sort) found.sort(compare);
  else found.sort((a, b) => passes(a) - passes(b)); // those that failed first, the others as they come
  const shown = found.slice(0, view.limit);
  for (const one of shown) one.measured ??= measuresOf(one);
  document.querySelector("#cells tbody").replaceChildren(...shown.map(rowOf));
  control("count").textContent = `${shown.length} of ${found.length} cells that fit; ${all} in all`;
  control("more").hidden = shown.length === found.length;
}

function tableHeads() {
  const row = document.querySelector("#cells thead tr");
  for (const column of COLUMNS) {
    const th = make("th", null, { scope: "col", "aria-sort": "none", title: column.about || "" });
    const button = make("button", column.title, { type: "button" });
    button.addEventListener("click", () => {
      view.down = view.sort === column && !view.down;
      view.sort = column;
      for (const other of row.cells) other.setAttribute("aria-sort", "none");
      th.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      fillTable(chosenCells());
    });
    th.append(button);
    row.append(th);
  }
  document.querySelector("#cells tbody").addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && !String(getSelection())) openCell(row.cell);
  });
}

function refresh() {
  const chosen = chosenCells();
  drawMaps(chosen);
  fillTable(chosen);
}

function filters() {
  platforms.forEach(({ label }, number) => control("platform").append(make("option", `${number + 1}: ${label}`, { value: number })));
  const outcomes = new Set(cells.flatMap((cell) => cell.records.filter(Boolean).map((one) => one.outcome)));
  for (const value of outcomes) control("outcome").append(make("option", value.replace("_", " "), { value }));
  const renew = () => { view.limit = PAGE; refresh(); };
  for (const name of ["platform", "outcome", "differing", "failures"]) control(name).addEventListener("change", renew);
  control("words").addEventListener("input", renew);
  control("filters").addEventListener("submit", (event) => event.preventDefault());
  // What nothing can be told by is not offered.
  control("differing").disabled = !cells.some((cell) => cell.differs);
  control("failures").disabled = !cells.some((cell) => cell.case.failure);
  control("more").addEventListener("click", () => { view.limit += 5 * PAGE; fillTable(chosenCells()); });
}
