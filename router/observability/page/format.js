// Formats numbers for people.

export const count = (value) => Math.round(value).toLocaleString("en");

export const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${Math.round(share * 100)} %`);

/** A share with one decimal: little KV on a large worker must not look like none. */
export const share = (value) => (value === null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(1)} %`);

/** About three digits and their unit: ["12.3", "ms"]. */
export function duration(ms) {
  if (ms === null || ms === undefined) return ["–", "ms"];
  if (ms < 9.95) return [ms.toFixed(ms < 0.95 ? 2 : 1), "ms"];
  if (ms < 999.5) return [ms.toFixed(0), "ms"];
  if (ms < 9995) return [(ms / 1000).toFixed(2), "s"];
  return ms < 99950 ? [(ms / 1000).toFixed(1), "s"] : [(ms / 1000).toFixed(0), "s"];
}

export const time = (ms) => (ms === null || ms === undefined ? "–" : duration(ms).join(" "));

export function rate(value) {
  return value >= 99.95 || value === 0 ? count(value) : value.toFixed(1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ${units[unit]}`;
}

export const clock = (unixSeconds) =>
  new Date(unixSeconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** A worker's name without that of its model: all workers of a snapshot are of one model. */
export const ownName = (id, prefix) => (id.startsWith(prefix) ? id.slice(prefix.length) : id);
