// The page of the lab.

const short = (value) => (value >= 1000 ? `${+(value / 1000).toPrecision(3)}k` : number(value));

function experiment(one) {
  const findings = one.findings.map((text) => element("p", { style: "margin-top:8px" }, text));
  const series = one.series.map((line) => ({
    name: line.name, colour: colour(line.paint), points: line.points, small: true, alone: line.dots,
  }));
  const drawn = series.length
    ? curves(one.title, one.axes, series, {
      unit: one.unit, xUnit: one.x_unit, logY: one.log_y, xFormat: short, format: short,
      limits: one.limit ? [one.limit] : [], mark: one.mark, linear: one.x_unit === "s",
    })
    : card(one.title, one.axes);
  if (one.table.length) {
    const [head, ...rows] = one.table;
    // Without a plot, the rows of each phase are a table beside the other's.
    const kind = (row) => (series.length ? "" : row[0].split(",")[0]);
    const tables = [...new Set(rows.map(kind))].map((name) => table(head, rows.filter((row) => kind(row) === name)));
    drawn.append(element("div", { class: tables.length > 1 ? "grid" : "stack" }, ...tables));
    drawn.style.gridColumn = "1 / -1";
  }
  drawn.append(...findings);
  return drawn;
}

document.getElementById("top").append(
  element("h1", {}, `The two phases of inference: ${DATA.model}`),
  element("p", { class: "sub lead", style: "margin-bottom:0" },
    "Prefill reads a prompt in parallel and is bound by arithmetic. Decode writes an answer token by token and is bound by memory bandwidth. "
    + "kvrelay gives each phase workers of its own."),
  element("div", { class: "chips" },
    element("span", { class: "chip" }, element("b", {}, "machine "), DATA.machine),
    element("span", { class: "chip" }, element("b", {}, "engine "), DATA.weights)),
  DATA.disturbance && element("div", { class: "banner" }, sentence(`${DATA.disturbance}.`)));
document.getElementById("main").replaceChildren(
  element("div", { class: "grid", style: "margin-top:22px" }, ...DATA.experiments.map(experiment)));
