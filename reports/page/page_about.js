// The panel: all that is known of a cell, a case or a kernel.

const list = (pairs) => make("dl", null, {}, ...pairs.filter(([, told]) => told !== "" && told !== null && told !== undefined)
  .flatMap(([name, told]) => [make("dt", name), typeof told === "object" ? make("dd", null, {}, told) : make("dd", told)]));

function show(title, ...parts) {
  control("about-title").textContent = title;
  control("about-body").replaceChildren(...parts.filter(Boolean));
  control("about").showModal();
  control("about").scrollTop = 0;
}

function caseFacts(about) {
  return [["case", about.name], ["what it is", about.about], ["source", about.source], ["group", about.group],
    ["failure input", about.failure ? "yes: rounding is known to fail on it" : ""], ["nothing is claimed of other kernels", about.unclaimed]];
}
const openCase = (about) => show(about.name, list(caseFacts(about)));

function plans(backend, kernel) {
  const found = new Map();
  for (const cell of cells) {
    if (cell.backend !== backend || cell.kernel !== kernel) continue;
    for (const one of cell.records) if (one?.plan) found.set(one.plan, true);
  }
  const told = new Set(platforms.map((one) => one.explanations[`${backend}-${kernel}`]).filter(Boolean));
  return [["declared plan", [...found.keys()].join(", ") || "none"], ["plan that fits best", [...told].join("; ")]];
}
const assumed = (backend) => [...new Set(platforms.map((one) => one.facts[`backend ${backend}`]).filter(Boolean))].join("; ");
const openKernel = ({ backend, format, kernel }) => show(kernel,
  list([["kernel", kernel], ["backend", backend], ["assumed", assumed(backend)], ["format", format], ...plans(backend, kernel)]));

const AGREEMENTS = { "=": "All platforms give the same bits.", "~": "Other bits, the same verdict and outcome.",
  "!": "Platforms differ in verdict or outcome.", "-": "Some platform lacks the cell or skipped it; the others agree.",
  "/": "Not comparable: another version of the case, another seed or number of heads." };

// Which platforms say what, in one table.
function side(cell) {
  const table = make("table", null, { class: "side" });
  const head = table.createTHead().insertRow();
  for (const title of ["", "platform", "shown", "verdict", "outcome", "bits"]) head.append(make("th", title, { scope: "col" }));
  const body = table.createTBody();
  cell.records.forEach((one, number) => {
    const row = body.insertRow();
    row.append(make("td", number + 1), make("th", platforms[number].label, { scope: "row" }));
    row.append(make("td", one ? one.text : MISSING, { class: one ? classes(one) : "none" }));
    row.append(make("td", one ? VERDICTS[one.verdict] || "" : ""), make("td", one ? one.outcome.replace("_", " ") : ""));
    row.append(make("td", cell.bits[number]));
  });
  return make("div", null, { class: "wide", tabindex: "0", role: "region", "aria-label": "platforms" }, table);
}

const ANSWERS = new Map([[true, "passed"], [false, "failed"], [null, "undecided"]]);
function checks(record) {
  const { answers } = record;
  if (!answers.length) return null;
  return make("ul", null, { class: "checks" }, ...answers.map(({ check, passed, asked, why, source }) => {
    const words = ` ${ANSWERS.get(passed)}: ${asked}`;
    const item = make("li", null, { class: passed === true ? "" : "unmet" }, make("b", check), words);
    if (why) item.append(make("div", why));
    if (source) item.append(make("div", null, {}, make("small", `source: ${source}`)));
    return item;
  }));
}

function numbers(record) {
  const table = make("table", null, { class: "numbers" });
  const body = table.createTBody();
  for (const [measure, found] of measuresOf(record)) {
    const row = body.insertRow();
    row.append(make("th", measure.name, { scope: "row", title: measure.about }));
    row.append(make("td", found.value === null ? "none" : estimate(found), { class: "number" }), make("td", measure.unit));
    row.append(make("td", measure.about, { class: "told" }));
  }
  return make("div", null, { class: "wide", tabindex: "0", role: "region", "aria-label": "measures" }, table);
}

const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Shares of elements by signed error, in ulps.
function histogram([low, width, outside, counts]) {
  const [wide, high, foot] = [360, 120, 18];
  const most = Math.max(...counts, 1);
  const svg = drawn("svg", { viewBox: `0 0 ${wide} ${high + foot}`, role: "img", class: "histogram",
    "aria-label": "histogram of signed errors in ulps" });
  counts.forEach((count, at) => {
    const tall = (count / most) * high;
    svg.append(drawn("rect", { x: (at / counts.length) * wide, y: high - tall, width: wide / counts.length - 0.5, height: tall }));
  });
  const places = [low, low + (width * counts.length) / 2, low + width * counts.length];
  ["start", "middle", "end"].forEach((anchor, at) =>
    svg.append(drawn("text", { x: (at / 2) * wide, y: high + foot - 4, "text-anchor": anchor }, digits(places[at]))));
  return make("div", null, {}, svg, make("small", `signed errors in ulps; ${outside} elements beyond`));
}

// Copies without network or permission: what is selected is copied where the clipboard's own interface is not there.
function copier(code) {
  const button = make("button", "copy", { type: "button", class: "copy" });
  button.addEventListener("click", async () => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "copied" : "selected";
  });
  return button;
}

function recordPart(cell, number, open) {
  const record = cell.records[number];
  const alike = cell.same.flatMap((one, at) => (one === number && cell.records[at] ? [at] : []));
  const bias = measures.length && [...measuresOf(record)].find(([, found]) => found.half !== null && found.value === record.tone);
  const { evidence } = record;
  const code = make("code", record.command);
  const facts = platforms[number].facts;
  const part = make("details", null, open ? { open: "" } : {});
  part.append(
    make("summary", alike.map((at) => `${at + 1}: ${platforms[at].label}`).join("; ")),
    list([
      ["shown", make("span", record.text, { class: `chip ${classes(record)}` })],
      ["outcome", record.outcome.replace("_", " ")], ["excused", record.excused], ["skipped", record.skipped],
      ["verdict", [VERDICTS[record.verdict], bias && `${bias[0].name} ${estimate(bias[1])} ${bias[0].unit}`].filter(Boolean).join(": ")],
    ]),
    make("h3", "Checks"), checks(record) || make("p", "Nothing was asked."),
    make("h3", "Measures"), numbers(record),
    ...(evidence.histogram ? [make("h3", "Errors"), histogram(evidence.histogram)] : []),
    ...(evidence.fits ? [make("h3", "Plans that fit best"),
      list(evidence.fits.map(([plan, bits]) => [plan, `${digits(100 * bits)} % of bits`]))] : []),
    make("h3", "Run it again"), make("p", null, { class: "command" }, code, copier(code)),
    list([["declared plan", record.plan || "none"], ["seed", record.seed], ["heads", record.heads],
      ["version of the case", record.version], ["digest of the bits", record.digest],
      ...evidence.more,
      ...Object.entries(facts).filter(([name]) => name !== "label")]),
  );
  return part;
}

function openCell(cell) {
  const several = cell.records.length > 1;
  const first = cell.records.findIndex(Boolean);
  const chosen = control("platform").value;
  const opened = chosen !== "" && cell.records[Number(chosen)] ? cell.same[Number(chosen)] : first;
  const different = [...new Set(cell.same)].filter((number) => cell.records[number]);
  show(`${cell.kernel} on ${cell.backend}, ${cell.case.name}`,
    list([...caseFacts(cell.case).slice(1), ["format", cell.format], ["assumed", assumed(cell.backend)],
      ...plans(cell.backend, cell.kernel)]),
    several ? make("p", AGREEMENTS[cell.agreement] || "") : null,
    several ? side(cell) : null,
    ...different.map((number) => recordPart(cell, number, number === opened)));
}

function panel() {
  control("close").addEventListener("click", () => control("about").close());
  control("about").addEventListener("click", (event) => { // beside the panel
    if (event.target === control("about")) control("about").close();
  });
}

panel();
tableHeads();
filters();
printing();
refresh();
document.body.dataset.ready = "true";
