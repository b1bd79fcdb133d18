// A plot of curves over numbers. Each series: name, colour, points [x, y], and dash for a line
// without dots. Options: unit of y, xUnit, high (end of the y axis), logY, format (of y), xFormat,
// limits [y, text], mark [x, text], dots: false for lines without dots, linear: true for an x axis
// that is never logarithmic.

function curves(title, sub, series, options) {
  const format = options.format ?? number;
  const xFormat = options.xFormat ?? number;
  const all = series.flatMap((one) => one.points);
  if (!all.length) return card(title, sub);
  const places = all.map((one) => one[0]);
  const plot = chart(230, title, (svg, width) => {
    const [left, right, top, base] = [options.logY ? 62 : 48, width - 14, 12, 190];
    const [low, high] = [Math.min(...places), Math.max(...places)];
    const wide = !options.linear && high > 6 * low;
    const x = scale(wide ? low * 0.9 : 0, high * 1.05, left, right, wide);
    const upper = options.high ?? Math.max(...all.map((one) => one[1])) * (options.logY ? 1.5 : 1.08);
    const lower = options.logY ? Math.min(...all.map((one) => one[1]).filter((value) => value > 0)) / 1.5 : 0;
    const y = scale(lower, Math.max(upper, 1e-12), base, top, options.logY);
    const grid = options.logY ? logTicks(lower, upper).filter((value, index, found) => found.length < 7 || index % 2 === 0) : ticks(0, upper, 4);
    yGrid(svg, y, grid.filter((value) => value <= upper), left, right, format);
    xAxis(svg, x, wide ? logTicks(low * 0.9, high * 1.05) : ticks(0, high, Math.max(3, width / 80)), base, xFormat, logScale(options.xUnit, wide), left, right);
    if (options.logY) shape("text", { x: left, y: top - 3 }, svg, "log scale");
    for (const [value, text] of options.limits ?? []) {
      if (value > upper || value < lower) continue;
      shape("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "slo" }, svg);
      // At the end where the curves leave more room.
      const long = text.length * CHARACTER;
      const room = (from) => clearance(series.map((one) => one.points.map(([at, up]) => [x(at), y(up)])), from, from + long, y(value) - 9);
      const end = room(left + 4) < room(right - long);
      shape("text", { x: end ? right : left + 4, y: y(value) - 5, class: "slo-text", "text-anchor": end ? "end" : "start" }, svg, text);
    }
    if (options.mark && options.mark[0] >= low && options.mark[0] <= high * 1.05) {
      const at = x(options.mark[0]);
      shape("line", { x1: at, x2: at, y1: top, y2: base, class: "mark" }, svg);
      const end = at > right - 100;
      shape("text", { x: at + (end ? -6 : 6), y: base - 8, class: "strong", "text-anchor": end ? "end" : "start" }, svg, options.mark[1]);
    }
    for (const one of series) {
      const points = one.points.map(([at, value]) => [x(at), y(Math.min(value, upper))]);
      if (!one.alone) shape("path", { d: path(points), fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dash || "none" }, svg);
      if (one.dash) continue;
      one.points.forEach(([at, value], index) => {
        const dot = shape("circle", { cx: points[index][0], cy: points[index][1], r: one.small ? 2.6 : 4.5, fill: one.colour, stroke: "var(--card)", "stroke-width": one.small ? 0.8 : 1.5 }, svg);
        dot.addEventListener("pointermove", (event) => showTip(event, [[one.colour, `${format(value)}${options.unit ?? ""} at ${xFormat(at)} ${options.xUnit}`], [null, one.labels ? one.labels[index] : one.name]]));
        dot.addEventListener("pointerleave", hideTip);
      });
    }
  });
  return card(title, sub, series.length > 1 ? legend(series.map((one) => [one.colour, one.name, "line"])) : null, plot);
}

/** The distance of lines from a height between two places, all in px. */
function clearance(lines, from, to, height) {
  const gaps = lines.flatMap((points) => points.slice(1).flatMap(([at, up], index) => {
    const [before, lower] = points[index];
    const [low, high] = [Math.max(from, before), Math.min(to, at)];
    if (low > high) return [];
    const on = (place) => lower + ((place - before) / (at - before || 1)) * (up - lower) - height;
    // A line that crosses the height has none.
    return on(low) * on(high) < 0 ? [0] : [Math.abs(on(low)), Math.abs(on(high))];
  }));
  return Math.min(Infinity, ...gaps);
}
