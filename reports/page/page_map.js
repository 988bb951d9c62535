// The map: cases down, kernels across, one number where all platforms agree, each where they differ.

// What stands in a place of the map: a line, or one for every text that differs, with the numbers of its platforms.
function linesOf(cell) {
  const records = seen(cell);
  const present = records.filter(Boolean);
  if (!present.length) return [];
  if (!told(cell)) return [{ record: present[0], numbers: [] }];
  const lines = new Map();
  records.forEach((record, number) => {
    if (!record) return;
    const key = `${record.text} ${mark(record)} ${record.verdict}`;
    if (!lines.has(key)) lines.set(key, { record, numbers: [] });
    lines.get(key).numbers.push(number + 1);
  });
  // What all say alike needs no numbers.
  return lines.size > 1 ? [...lines.values()] : [{ record: present[0], numbers: [] }];
}
const told = (cell) => seen(cell).length > 1 && [DIFFERENT, OTHER_INPUTS].includes(cell.agreement);

function cellElement(cell, name) {
  const lines = cell ? linesOf(cell) : [];
  if (!lines.length) {
    // What no platform has was never asked for.
    const text = cell ? MISSING : "";
    return make("td", text, { class: "none missing", "aria-label": `${name}: ${text || "not asked for"}` });
  }
  const [{ record, numbers }] = lines;
  let element;
  if (!numbers.length) {
    const others = told(cell) ? ", other inputs" : "";
    element = make("td", record.text, { class: classes(record), "aria-label": `${name}: ${spoken(record)}${others}` });
  } else {
    const said = lines.map((line) => `platform ${line.numbers.join(", ")}: ${spoken(line.record)}`).join("; ");
    const word = cell.differs ? "platforms differ" : "other inputs";
    element = make("td", null, { class: cell.differs ? "differs" : "others", "aria-label": `${name}: ${word}: ${said}` });
    for (const line of lines) {
      element.append(make("div", null, { class: classes(line.record) },
        make("small", `${line.numbers.join(",")}: `), line.record.text));
    }
  }
  element.cell = cell;
  return element;
}

// Columns in order: those of a backend and format together.
function columnsOf(chosen) {
  const found = new Map();
  for (const cell of chosen) {
    if (!found.has(cell.column)) found.set(cell.column, { key: cell.column, backend: cell.backend, format: cell.format, kernel: cell.kernel });
  }
  return [...found.values()];
}

function headOf(columns) {
  const head = make("thead");
  const backends = make("tr", null, {}, make("td"));
  const kernels = make("tr", null, {}, make("th", "case", { scope: "col" }));
  let last = null;
  for (const column of columns) {
    const title = `${column.backend}, ${column.format}`;
    if (last?.title === title) last.th.colSpan += 1;
    else {
      last = { title, th: make("th", null, { scope: "colgroup" }, make("span", title)) };
      backends.append(last.th);
    }
    const th = make("th", null, { scope: "col" }, make("div", column.kernel, { title: column.kernel }));
    th.column = column;
    kernels.append(th);
  }
  head.append(backends, kernels);
  return head;
}

function rowHead(about, unit) {
  const parts = [make("div", about.name, { class: "name" }), make("div", about.about, { class: "about" })];
  if (unit) parts.push(make("div", unit, { class: "unit" }));
  const th = make("th", null, { scope: "row", title: about.about }, make("div", null, { class: "head" }, ...parts));
  th.about = about;
  return th;
}

// What the numbers of a case are in: those of a map of one unit stand above it.
const unitOf = ({ headline }) => { const found = measures.find(({ name }) => name === headline); return found ? found.unit || found.name : ""; };

function mapTable(chosen, columns, title, pooled) {
  // Few columns leave room for what the cases are.
  const table = make("table", null, { class: columns.length <= 8 ? "map few" : "map", "aria-label": title });
  table.append(headOf(columns));
  const found = new Map(chosen.map((cell) => [`${cell.place} ${cell.column}`, cell]));
  let group = null;
  let body = null;
  for (const place of [...new Set(chosen.map((cell) => cell.place))].sort((a, b) => a - b)) {
    const about = cases[place];
    if (about.group !== group || !body) {
      group = about.group;
      body = table.createTBody();
      if (group) body.append(make("tr", null, { class: "group" },
        make("th", null, { scope: "rowgroup", colspan: columns.length + 1 }, make("span", group))));
    }
    const row = body.insertRow();
    row.append(rowHead(about, pooled && unitOf(about)));
    for (const column of columns) {
      row.append(cellElement(found.get(`${place} ${column.key}`), `${column.kernel} on ${column.backend}, ${about.name}`));
    }
  }
  return table;
}

// With a filter on, the map has all cells of the rows and columns that fit: neighbours help to read a cell.
function around(chosen, all) {
  const [rows, columns] = [new Set(chosen.map((cell) => cell.place)), new Set(chosen.map((cell) => cell.column))];
  return all.filter((cell) => rows.has(cell.place) && columns.has(cell.column) && linesOf(cell).length);
}

const MAPS = [["cells-map", "kernels and cases", (cell) => !data.pooled.includes(cell.experiment)],
  ["pooled-map", "over seeds", (cell) => data.pooled.includes(cell.experiment), true]];
const partsOf = (chosen) => MAPS.map(([id, title, fits, pooled = false]) => {
  const shown = around(chosen.filter(fits), cells.filter(fits));
  return { holder: control(id), title, shown, pooled, columns: columnsOf(shown) };
});

function drawMaps(chosen) {
  for (const { holder, title, shown, pooled, columns } of partsOf(chosen)) {
    if (!holder) continue;
    if (!shown.length) {
      holder.replaceChildren(make("p", "No cell fits."));
      continue;
    }
    const table = mapTable(shown, columns, title, pooled);
    const wide = make("div", null, { class: "wide sheet", role: "region", "aria-label": `map: ${title}` }, table);
    wide.append(table);
    holder.replaceChildren(wide);
    asGrid(table);
  }
}

// One stop of the Tab key; arrows go on from there.
function asGrid(table) {
  table.setAttribute("role", "grid");
  const rows = [...table.rows].filter((row, at) => at > 0 && !row.classList.contains("group"));
  let [down, across] = [1, 1];
  const at = () => rows[down].cells[across];
  const go = (toDown, toAcross) => {
    at().removeAttribute("tabindex");
    down = Math.max(0, Math.min(rows.length - 1, toDown));
    across = Math.max(0, Math.min(rows[down].cells.length - 1, toAcross));
    at().tabIndex = 0;
  };
  go(1, 1);
  table.addEventListener("keydown", (event) => {
    const end = rows[down].cells.length - 1;
    const moves = { ArrowDown: [down + 1, across], ArrowUp: [down - 1, across], ArrowRight: [down, across + 1],
      ArrowLeft: [down, across - 1], Home: [event.ctrlKey ? 0 : down, 0],
      End: [event.ctrlKey ? rows.length - 1 : down, end], PageDown: [down + 10, across], PageUp: [down - 10, across] };
    if (event.key === "Enter" || event.key === " ") open(at());
    else if (moves[event.key]) { go(...moves[event.key]); at().focus(); } else return;
    event.preventDefault();
  });
  table.addEventListener("click", (event) => {
    const element = event.target.closest("td, th");
    const row = rows.indexOf(element?.parentElement);
    if (row < 0) return;
    go(row, element.cellIndex);
    at().focus();
    open(element);
  });
}

function open(element) {
  if (element.cell) openCell(element.cell);
  else if (element.about) openCase(element.about);
  else if (element.column) openKernel(element.column);
}

// On paper nothing scrolls: the maps are cut into parts as wide as a sheet, and what is folded is unfolded.
const SHEET = 1040; // px: A4 on its side, less its margins
const CHARACTER = 6.2; // px at the size of print
const BOLD = 1.2; // as wide: what failed is bold
const wide = (text) => CHARACTER * text.length * (/[!?]/.test(text) ? BOLD : 1);
const widthOf = (texts) => Math.max(30, ...texts.map(wide)) + 10;
const textsOf = (cell) => linesOf(cell).map(({ record, numbers }) => `${numbers.length ? `${numbers.join(",")}: ` : ""}${record.text}`);

function sheetsOf({ shown, columns }) {
  const room = SHEET - Math.min(234, widthOf(shown.map((cell) => cell.case.name)));
  const sheets = [];
  let left = 0;
  for (const column of columns) {
    const width = widthOf(shown.filter((cell) => cell.column === column.key).flatMap(textsOf));
    if (width > left || !sheets.length) {
      sheets.push([]);
      left = room;
    }
    sheets.at(-1).push(column);
    left -= width;
  }
  return sheets;
}

let unfolded = [];
function toPaper() {
  if (control("paper").childElementCount) return;
  for (const part of partsOf(chosenCells())) {
    for (const columns of sheetsOf(part)) {
      const keys = new Set(columns.map((column) => column.key));
      control("paper").append(mapTable(part.shown.filter((cell) => keys.has(cell.column)), columns, part.title, part.pooled));
    }
  }
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const one of unfolded) one.open = true;
}
function fromPaper() {
  control("paper").replaceChildren();
  for (const one of unfolded) one.open = false;
  unfolded = [];
}
function printing() {
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);
  matchMedia("print").addEventListener("change", (event) => (event.matches ? toPaper() : fromPaper()));
}
