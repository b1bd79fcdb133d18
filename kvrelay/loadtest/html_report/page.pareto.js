// A sweep of simulations: goodput against cost, the latencies, and the table of all points.

// px. Dots that are closer lie on each other.
const TOUCH = 6;
// Names of dots on each other that the hover text lists.
const MOST_NAMES = 5;

function paretoText() {
  const points = DATA.pareto.points;
  return `${points.length} simulated clusters under one load; ${points.filter((one) => one.pareto).length} of them are beaten by no other.`;
}

/** Ends of an axis that show how the values differ: it begins at 0 if they differ much. */
function ends(values) {
  const [low, high] = [Math.min(...values), most(values) || 1];
  if (low < high / 2) return [0, 1.08 * high];
  // So much that the labels of the axis, of three digits, differ.
  const pad = Math.max(0.1 * (high - low), 0.1 * high);
  return [low - pad, high + pad];
}

/** `across`, `up`: [unit of the axis, function from a point to its value]. */
function paretoPlot(title, across, up, joined) {
  // Points that no other beats are drawn over the others.
  const points = DATA.pareto.points.filter((one) => across[1](one) !== null && up[1](one) !== null)
    .sort((a, b) => a.pareto - b.pareto || a.cost - b.cost);
  return chart(340, title, (svg, width) => {
    const [left, right, top, base] = [52, width - 16, 24, 296];
    const x = scale(...ends(points.map(across[1])), left, right);
    const y = scale(...ends(points.map(up[1])), base, top);
    yGrid(svg, y, ticks(y.inverse(base), y.inverse(top), 5), left, right, number);
    xAxis(svg, x, ticks(x.inverse(left), x.inverse(right), Math.max(3, width / 110)), base, number, across[0], left, right);
    shape("text", { x: left, y: top - 10 }, svg, up[0]);
    const placed = points.map((one) => [one, x(across[1](one)), y(up[1](one))]);
    const best = placed.filter(([one]) => one.pareto);
    if (joined) shape("path", { d: path(stepped(best.map(([, at, height]) => [at, height]))), fill: "none", stroke: runColour(0), "stroke-width": 2 }, svg);
    for (const [one, at, height] of placed) {
      const dot = shape("circle", {
        cx: at, cy: height, r: one.pareto ? 5.5 : 4, fill: one.pareto ? runColour(0) : colour("plain"),
        stroke: "var(--card)", "stroke-width": 1.5,
      }, svg);
      const here = placed.filter(([, itsX, itsY]) => Math.hypot(itsX - at, itsY - height) < TOUCH).map(([found]) => found);
      dot.addEventListener("pointermove", (event) => showTip(event, paretoTip(one, here)));
      dot.addEventListener("pointerleave", hideTip);
    }
  });
}

function paretoTip(one, here) {
  const names = here.slice(-MOST_NAMES).map((found) => found.name).join("; ");
  return [
    [null, here.length > MOST_NAMES ? `${names}; ${here.length - MOST_NAMES} more` : names],
    [runColour(0), `goodput ${number(one.goodput)}/s`], [null, `${number(one.cost)} workers, ${percent(one.good_share)} within every objective`],
    [null, `TTFT p99 ${ms(p99(one, "TTFT"))}, ITL p99 ${ms(p99(one, "ITL"))}`],
  ];
}

const p99 = (one, name) => one.latencies[name] && one.latencies[name].p99 * 1000;

function paretoCards() {
  const points = DATA.pareto.points;
  const latency = (one, name) => [ms(one.latencies[name] && one.latencies[name].median * 1000), ms(p99(one, name))];
  const rows = points.map((one) => [one.name, number(one.cost), number(one.goodput), percent(one.good_share), percent(one.cached_share), String(one.failed), ...latency(one, "TTFT"), ...latency(one, "ITL"), one.pareto ? "yes" : "no"]);
  const head = ["point", "workers", "goodput/s", "within objectives", "cached", "failed", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "Pareto"];
  const names = () => legend([[runColour(0), "beaten by no other"], [colour("plain"), "beaten"]]);
  const goodput = paretoPlot("Goodput against cost", ["workers, mean over the run", (one) => one.cost], ["requests/s", (one) => one.goodput], true);
  const latencies = paretoPlot("TTFT against ITL", ["ITL p99, ms", (one) => p99(one, "ITL")], ["TTFT p99, ms", (one) => p99(one, "TTFT")], false);
  return [
    ...heading("Goodput, cost and latency", "A cluster beats another with at least as much goodput from at most as many workers. If both are equal, the lower p99 of TTFT and ITL wins. Figures are compared to three digits."),
    element("div", { class: "grid" },
      card("Goodput against cost", "Requests per second that met every objective, and the mean number of workers. The line joins the clusters that no other cluster beats.", names(), goodput),
      card("TTFT against ITL", "The p99 of each cluster. Lower is better.", names(), latencies)),
    element("div", { style: "height:14px" }),
    card("All points", null, table(head, rows, [0])),
  ];
}
