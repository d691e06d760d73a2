// What a chart shows, apart from how it is drawn. x is a step (or another count) throughout.
import type { Colour } from "./colours.ts";

export type Numbers = readonly (number | null)[];

export interface Line {
  label: string;
  colour: Colour;
  mean: Numbers;
  /** The range of the rows behind each point. */
  low?: Numbers;
  high?: Numbers;
  /** Fill from zero or from the line below: parts of a whole. */
  stacked?: boolean;
}

/** A finding that held over some steps. */
export interface Span {
  from: number;
  /** null: it still holds. */
  to: number | null;
  level: "note" | "warning" | "critical";
  label: string;
}

/** A measurement beside the curve: an evaluation with its interval. */
export interface Point {
  x: number;
  y: number;
  low?: number | null;
  high?: number | null;
  label: string;
}

export interface ChartModel {
  x: readonly number[];
  lines: readonly Line[];
  spans?: readonly Span[];
  points?: readonly Point[];
  /** Steps with a checkpoint. */
  checkpoints?: readonly number[];
  /** Values are shares from 0 to 1, shown as percentages. */
  share?: boolean;
  unit?: string;
}

/** The lowest and highest value that the chart must show, with some air; shares keep 0 to 1 if they come near it. */
export function extent(model: ChartModel, from: number, to: number): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  const take = (value: number | null | undefined) => {
    if (value == null || !Number.isFinite(value)) return;
    if (value < low) low = value;
    if (value > high) high = value;
  };
  const { x } = model;
  const sums: number[] = [];
  const stacked = model.lines.filter((line) => line.stacked);
  for (let i = 0; i < x.length; i += 1) {
    if (x[i]! < from || x[i]! > to) continue;
    for (const line of model.lines) {
      take(line.mean[i]);
      take(line.low?.[i]);
      take(line.high?.[i]);
    }
    if (stacked.length) sums.push(stacked.reduce((sum, line) => sum + (line.mean[i] ?? 0), 0));
  }
  if (sums.length) return [0, mostOf(sums) * 1.06 || 1];
  for (const point of model.points ?? []) {
    if (point.x < from || point.x > to) continue;
    take(point.low ?? point.y);
    take(point.high ?? point.y);
  }
  if (low > high) return [0, 1];
  if (low === 0 && high === 0) return [0, model.share ? 0.1 : 1];
  if (model.share && low >= 0 && high <= 1 && high - low > 0.3) return [0, 1];
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  const floor = low >= 0 && low < (high - low) * 0.6 ? 0 : low - air;
  return [floor, high + air];
}

/** The largest value; but if a few are many times the others, as a first step that compiles, what holds the others. */
function mostOf(values: number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const usual = sorted[Math.floor(sorted.length * 0.97)]!;
  const most = sorted.at(-1)!;
  return most > 5 * usual ? 1.5 * usual : most;
}

/** At most `most` points: neighbours become their mean, with the range of both their ranges. A curve of single steps is
 * mostly noise, which the band shows better than a line through every one. */
export function thinned(model: ChartModel, most: number): ChartModel {
  const each = Math.ceil(model.x.length / most);
  if (each < 2) return model;
  const starts = Array.from({ length: Math.ceil(model.x.length / each) }, (_, i) => i * each);
  const over = (values: Numbers, reduce: (known: number[]) => number) =>
    starts.map((start) => {
      const known = values.slice(start, start + each).filter((value) => value != null);
      return known.length ? reduce(known) : null;
    });
  const mean = (known: number[]) => known.reduce((sum, value) => sum + value, 0) / known.length;
  return {
    ...model,
    x: starts.map((start) => model.x[Math.min(start + each, model.x.length) - 1]!),
    lines: model.lines.map((line) => ({
      ...line,
      mean: over(line.mean, mean),
      low: line.low && over(line.low, (known) => Math.min(...known)),
      high: line.high && over(line.high, (known) => Math.max(...known)),
    })),
  };
}
