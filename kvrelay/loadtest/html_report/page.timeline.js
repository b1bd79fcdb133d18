// Arrivals, client latencies, queues and pool sizes, as lanes over one time axis.

// px. The least distance at which the numbers of two decisions do not overlap.
const FLAG = 18;

function lane(title, tall, values, format, paint, options = {}) {
  return { title, tall, values, format, paint, ...options };
}

function stepLine(x, y, end, series) {
  const points = series.points.map(([at, value]) => [x(at), y(value)]);
  if (end !== undefined) points.push([x(end), points.at(-1)[1]]);
  return path(stepped(points));
}

// Draws one line for each series. The line has a gap where a value is unknown. `shift`, in px, keeps
// lines of equal values apart.
function drawLines(series) {
  return (svg, x, y, base) => {
    for (const one of series) {
      if (!one.points.length) continue;
      const runs = one.points.reduce((all, point) => {
        if (point[1] === null) all.push([]);
        else all.at(-1).push(point);
        return all;
      }, [[]]).filter((points) => points.length);
      for (const points of runs) {
        const drawn = stepLine(x, (value) => y(value) + (one.shift ?? 0), one.end, { points });
        if (one.fill) shape("path", { d: `${drawn}V${base}H${x(points[0][0]).toFixed(1)}Z`, fill: one.colour, "fill-opacity": 0.13 }, svg);
        shape("path", { d: drawn, fill: "none", stroke: one.colour, "stroke-width": 1.8, "stroke-dasharray": one.dash || "none" }, svg);
      }
    }
  };
}

function drawDots(run) {
  return (svg, x, y) => {
    for (const [at, value, where] of run.dots) {
      const dot = shape("circle", { cx: x(at).toFixed(1), cy: y(value).toFixed(1), "pointer-events": "all", ...PATH_MARKS[where] ?? PATH_MARKS[""] }, svg);
      dot.addEventListener("pointermove", (event) => { event.stopPropagation(); showTip(event, [[colour("plain"), `TTFT ${ms(value)}`], [null, `due at ${seconds(at)}${where ? `, ${where}` : ""}`]]); });
    }
  };
}

// Paths differ by shape: a colour means a phase.
const PATH_MARKS = {
  disaggregated: { r: 2.6, fill: colour("plain"), "fill-opacity": 0.75 },
  local: { r: 2.6, fill: "none", stroke: colour("plain"), "stroke-width": 1.3 },
  "": { r: 2.6, fill: colour("first"), "fill-opacity": 0.75 },
};
const lastAt = (points, at) => points.findLast((point) => point[0] <= at) ?? points[0];

function lanesOf(run, span) {
  const { bin_s: bin, arrivals, itl_p95_ms: itl } = run.binned;
  const binned = (values) => values.map((value, index) => [index * bin, value]);
  const ofLines = (title, tall, series, format, options = {}) =>
    lane(title, tall, series.flatMap((one) => one.points.map((point) => point[1] ?? 0)), format, drawLines(series), { series, ...options });
  const all = [ofLines("Arrivals per second", 54, [{ name: "arrivals", colour: colour("plain"), points: binned(arrivals), fill: true, end: span }], number)];
  const shown = run.dots.filter((one) => one[1] > 0);
  if (shown.length)
    all.push(lane("TTFT, ms, by arrival, log scale", 96, shown.map((one) => one[1]), number, drawDots({ dots: shown }), { logarithmic: true, series: [], limit: run.slos.ttft }));
  if (itl.some((one) => one !== null))
    all.push(ofLines("ITL p95, ms", 60, [{ name: "ITL p95", colour: colour("decode"), points: binned(itl) }], number));
  if (!run.timeline || !run.timeline.samples.length) return all;
  const samples = run.timeline.samples;
  const of = (pick) => samples.map((one) => [one.at_s, pick(one)]);
  const pools = Object.keys(samples[0].pools);
  const each = (field, more = {}) => pools.map((pool) => ({ name: pool, colour: colour(pool), points: of((one) => one.pools[pool]?.[field] ?? 0), ...more }));
  const apart = (all) => all.map((one, index) => ({ ...one, shift: 3 * (index - (all.length - 1) / 2) }));
  const wanted = apart(each("desired", { dash: "2 3" })).map((one) => ({ ...one, name: `${one.name}, desired` }));
  all.push(ofLines("Requests waiting", 76, [{ name: "router", colour: colour("queue"), points: of((one) => one.waiting), fill: true }, ...each("waiting")], number, { whole: true }));
  all.push(ofLines("Workers", 64, [...apart(each("workers")), ...wanted], number, { whole: true }));
  return all;
}

function drawMarks(svg, x, top, base, marks) {
  let [end, row] = [-Infinity, 0];
  marks.forEach((mark, index) => {
    const at = x(mark.at_s);
    row = at < end + FLAG ? (row + 1) % 3 : 0;
    end = at;
    shape("line", { x1: at, x2: at, y1: top - 6 - FLAG * row, y2: base, class: "mark" }, svg);
    const flag = shape("g", { style: "cursor:default" }, svg);
    shape("circle", { cx: at, cy: top - 14 - FLAG * row, r: 8, fill: colour(mark.pool) }, flag);
    shape("text", { x: at, y: top - 10.5 - FLAG * row, "text-anchor": "middle", style: "fill:#fff;font-weight:650;font-size:10px" }, flag, index + 1);
    flag.addEventListener("pointermove", (event) => showTip(event, [[colour(mark.pool), `${mark.pool} ${mark.before} → ${mark.after}`], [null, `${seconds(mark.at_s)}: ${mark.reason}`]]));
    flag.addEventListener("pointerleave", hideTip);
  });
}

function story(run, span) {
  const lanes = lanesOf(run, span);
  const marks = run.timeline ? run.timeline.decisions.filter((one) => one.at_s >= 0 && one.at_s <= span) : [];
  const head = marks.length ? 22 + 2 * FLAG : 4;
  const tall = head + lanes.reduce((sum, one) => sum + one.tall + 30, 0) + 34;
  const plot = chart(tall, "Load, latencies, queues and pool sizes over time", (svg, width) => {
    const [left, right] = [48, width - 12];
    const x = scale(0, span, left, right);
    let top = head;
    const base = tall - 40;
    for (const one of lanes) {
      const foot = top + 20 + one.tall;
      const high = most(one.values) || 1;
      const low = one.logarithmic ? Math.min(...one.values) * 0.8 : 0;
      const grid = one.logarithmic ? logTicks(low, high * 1.2).filter((_, index, all) => all.length < 5 || index % 2 === 0)
        : ticks(0, high, 3).filter((value) => !one.whole || Number.isInteger(value));
      const y = scale(low, one.logarithmic ? high * 1.2 : Math.max(high, grid.at(-1)) * 1.04, foot, top + 20, one.logarithmic);
      shape("text", { x: left, y: top + 12, class: "strong" }, svg, one.title);
      yGrid(svg, y, grid, left, right, one.format);
      if (one.limit && one.limit > low && one.limit < high) {
        shape("line", { x1: left, x2: right, y1: y(one.limit), y2: y(one.limit), class: "slo" }, svg);
        shape("text", { x: right, y: y(one.limit) - 4, "text-anchor": "end", class: "slo-text" }, svg, `SLO ${number(one.limit)} ms`);
      }
      shape("line", { x1: left, x2: right, y1: foot, y2: foot, class: "axis" }, svg);
      one.place = [y, foot];
      top = foot + 10;
    }
    const cross = shape("line", { y1: head, y2: base, class: "cross", visibility: "hidden" }, svg);
    const area = shape("rect", { x: left, y: head, width: right - left, height: base - head, fill: "transparent" }, svg);
    for (const one of lanes) one.paint(svg, x, ...one.place);
    drawMarks(svg, x, head, base, marks);
    xAxis(svg, x, ticks(0, span, Math.max(3, width / 110)), base, number, "seconds", left, right);
    const hide = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
    svg.addEventListener("pointerleave", hide);
    area.addEventListener("pointermove", (event) => {
      const at = Math.max(0, Math.min(span, x.inverse(event.clientX - svg.getBoundingClientRect().left)));
      for (const [name, value] of [["x1", x(at)], ["x2", x(at)], ["visibility", "visible"]]) cross.setAttribute(name, value);
      const rows = lanes.flatMap((one) => one.series.filter((series) => series.points.length).map((series) => {
        const value = lastAt(series.points, at)[1];
        return [series.colour, `${one.title.toLowerCase()}${one.series.length > 1 ? `, ${series.name}` : ""}: ${value === null ? "–" : one.format(value)}`];
      }));
      showTip(event, [[null, seconds(at)], ...rows]);
    });
  });
  const paths = [...new Set(run.dots.map((one) => one[2]))].filter(Boolean);
  const items = [...paths.map((one) => [colour("plain"), one, one === "local" ? "ring" : "dot"])];
  if (run.timeline) items.push([colour("queue"), "router's queue", "line"], [colour("prefill"), "prefill pool", "line"], [colour("decode"), "decode pool", "line"]);
  const reasons = marks.length
    ? table(["", "time", "pool", "workers", "reason"], marks.map((one, index) => [String(index + 1), seconds(one.at_s), one.pool, `${one.before} → ${one.after}`, one.reason]), [4])
    : run.timeline ? element("p", { class: "sub", style: "margin:8px 0 0" }, "No scaling decision.") : null;
  return card("Load, latencies, queues and pool sizes", run.timeline ? "Dashed lines: desired sizes. Numbers: scaling decisions, with their reasons below." : null, legend(items), plot, reasons && element("h3", { style: "margin:10px 0 4px" }, marks.length ? "Scaling decisions" : ""), reasons);
}
