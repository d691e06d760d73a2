// Numbers, times and durations as people read them. Every function accepts null for "not known".

const DASH = "–";

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 1740 -> "1,740"; fractions keep three significant digits. */
export function count(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return DASH;
  return Number.isInteger(value) || Math.abs(value) >= 1000 ? grouped.format(value) : number(value);
}

/** 111360 -> "111 k": for figures whose size matters, not their last digits. */
export function rough(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size < 10_000) return count(value);
  if (size < 1e6) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0).replace(/\.0$/, "")} k`;
  if (size < 1e9) return `${(value / 1e6).toFixed(1).replace(/\.0$/, "")} M`;
  return `${(value / 1e9).toFixed(1)} G`;
}

/** Three significant digits, without an exponent where that stays short. */
export function number(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return grouped.format(value);
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** 0.954 -> "95.4 %". */
export function percent(value: number | null | undefined, digits = 1): string {
  return value == null || !Number.isFinite(value) ? DASH : `${(value * 100).toFixed(digits)} %`;
}

/** US dollars; amounts below a cent are not worth their digits. */
export function money(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return DASH;
  return value > 0 && value < 0.01 ? "below $0.01" : `$${value.toFixed(2)}`;
}

const QUANTITIES: Record<string, (value: number) => string> = {
  wall_hours: (value) => duration(value * 3600),
  cpu_hours: (value) => `${number(value)} CPU h`,
  gpu_hours: (value) => `${number(value)} GPU h`,
  memory_gb: (value) => `${number(value)} GB of memory`,
  disk_gb: (value) => `${number(value)} GB of disk`,
  cost_usd: money,
};

/** A quantity of the owner's limits, such as wall_hours 12 -> "12 h". */
export function quantity(name: string, value: number): string {
  return QUANTITIES[name]?.(value) ?? `${count(value)} ${name.replaceAll("_", " ")}`;
}

/** Seconds -> "45 s", "6 min", "2.5 h", "3 d". Below a second: "400 ms". */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return DASH;
  if (seconds < 0) return "0 s";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 99.5 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Number((seconds / 3600).toFixed(1))} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** Bytes -> "12 kB", "3.4 GB". */
export function bytes(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 9.95 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** Seconds since the epoch -> the time of day, with the date if it is not today. */
export function clock(at: number | null | undefined): string {
  if (at == null) return DASH;
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString("en-GB");
  return when.toDateString() === new Date().toDateString()
    ? time
    : `${when.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time.slice(0, 5)}`;
}

/** How long ago, in words, measured against the clock of the answer. */
export function ago(at: number | null | undefined, now: number): string {
  return at == null ? DASH : `${duration(Math.max(1, now - at))} ago`;
}

/** "1 run", "3 runs". */
export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** Any JSON value as one short line. */
export function brief(value: unknown): string {
  if (value == null) return "none";
  if (typeof value === "string") return value;
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : number(value);
  if (typeof value === "boolean") return String(value);
  return JSON.stringify(value);
}
