// A sweep of simulations: goodput against cost, and the table of all points.

function paretoText() {
  const points = DATA.pareto.points;
  return `${points.length} simulated clusters under one load; ${points.filter((one) => one.pareto).length} of them are beaten by no other.`;
}

function paretoPlot() {
  const points = DATA.pareto.points;
  const best = points.filter((one) => one.pareto).sort((a, b) => a.cost - b.cost);
  return chart(340, "Goodput against cost", (svg, width) => {
    const [left, right, top, base] = [52, width - 16, 14, 296];
    const x = scale(0, (most(points.map((one) => one.cost)) || 1) * 1.05, left, right);
    const y = scale(0, (most(points.map((one) => one.goodput)) || 1) * 1.08, base, top);
    yGrid(svg, y, ticks(0, y.inverse(top), 5), left, right, number);
    xAxis(svg, x, ticks(0, x.inverse(right), Math.max(3, width / 110)), base, number, "workers, mean over the run", left, right);
    shape("path", { d: path(stepped(best.map((one) => [x(one.cost), y(one.goodput)]))), fill: "none", stroke: runColour(0), "stroke-width": 2 }, svg);
    for (const one of points) {
      const dot = shape("circle", {
        cx: x(one.cost), cy: y(one.goodput), r: one.pareto ? 5.5 : 4, fill: one.pareto ? runColour(0) : colour("plain"),
        stroke: "var(--card)", "stroke-width": 1.5,
      }, svg);
      dot.addEventListener("pointermove", (event) => showTip(event, [
        [null, one.name], [runColour(0), `goodput ${number(one.goodput)}/s`], [null, `${number(one.cost)} workers, ${percent(one.good_share)} within every objective`],
        [null, `TTFT p99 ${ms(one.latencies.TTFT && one.latencies.TTFT.p99 * 1000)}, ITL p99 ${ms(one.latencies.ITL && one.latencies.ITL.p99 * 1000)}`],
      ]));
      dot.addEventListener("pointerleave", hideTip);
    }
  });
}

function paretoCards() {
  const points = DATA.pareto.points;
  const latency = (one, name) => [ms(one.latencies[name] && one.latencies[name].median * 1000), ms(one.latencies[name] && one.latencies[name].p99 * 1000)];
  const rows = points.map((one) => [one.name, number(one.cost), number(one.goodput), percent(one.good_share), percent(one.cached_share), String(one.failed), ...latency(one, "TTFT"), ...latency(one, "ITL"), one.pareto ? "yes" : ""]);
  const head = ["point", "workers", "goodput/s", "within objectives", "cached", "failed", "TTFT p50", "p99", "ITL p50", "p99", "Pareto"];
  return [
    ...heading("Goodput against cost", "Requests per second that met every objective, and the mean number of workers. The line joins the clusters that no other cluster beats."),
    card(null, null, legend([[runColour(0), "beaten by no other"], [colour("plain"), "beaten"]]), paretoPlot()),
    element("div", { style: "height:14px" }),
    card("All points", null, table(head, rows, [0])),
  ];
}
