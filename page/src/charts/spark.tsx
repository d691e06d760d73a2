// Small drawings in lines of text: a curve of a few points, and intervals on one axis.
import { percent } from "../format.ts";

/** The course of a number, without axes. Decoration: the number stands beside it. */
export function Spark({ values, bad, wide }: { values: readonly (number | null)[]; bad?: boolean; wide?: boolean }) {
  const points = values.map((y, x) => [x, y] as const).filter((point): point is [number, number] => point[1] != null);
  if (points.length < 2) return <svg class="spark" aria-hidden="true" viewBox="0 0 56 18" />;
  const all = points.map((point) => point[1]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const [first, last] = [points[0]![0], points.at(-1)![0]];
  const at = ([x, y]: [number, number]) =>
    [2 + ((x - first) / (last - first)) * 50, high === low ? 9 : 15 - ((y - low) / (high - low)) * 12] as const;
  const end = at(points.at(-1)!);
  return (
    <svg class={`spark ${bad ? "bad" : ""}`} aria-hidden="true" viewBox="0 0 56 18" preserveAspectRatio={wide ? "none" : undefined}>
      <polyline points={points.map((point) => at(point).map((value) => value.toFixed(1)).join(",")).join(" ")} />
      {!wide && <circle cx={end[0].toFixed(1)} cy={end[1].toFixed(1)} r="2.2" />}
    </svg>
  );
}

export interface Estimate {
  value: number;
  low?: number | null;
  high?: number | null;
}

/** One line of a forest plot: the value with its interval, and the value before (hollow). The axis goes from 0 to 1. */
export function Interval({ before, after, axis }: { before?: Estimate | null; after?: Estimate | null; axis?: boolean }) {
  const x = (value: number) => 8 + Math.min(Math.max(value, 0), 1) * 184;
  const words = [before && `before ${range(before)}`, after && `after ${range(after)}`].filter(Boolean).join(", ");
  return (
    <svg class="interval" role="img" aria-label={words} viewBox={`0 0 200 ${axis ? 34 : 16}`}>
      {axis ? (
        [0, 0.25, 0.5, 0.75, 1].map((tick) => (
          <>
            <line class="grid" x1={x(tick)} x2={x(tick)} y1="0" y2="20" />
            <text x={x(tick)} y="32" text-anchor={tick === 0 ? "start" : tick === 1 ? "end" : "middle"}>
              {tick === 1 ? "100 %" : tick * 100}
            </text>
          </>
        ))
      ) : (
        <line class="grid" x1={x(0)} x2={x(1)} y1="8" y2="8" />
      )}
      {before && <Mark x={x} estimate={before} y={axis ? 6 : 8} hollow />}
      {after && <Mark x={x} estimate={after} y={axis ? 14 : 8} />}
    </svg>
  );
}

function Mark({ x, estimate, y, hollow }: { x: (value: number) => number; estimate: Estimate; y: number; hollow?: boolean }) {
  return (
    <g class={hollow ? "hollow" : "full"}>
      {estimate.low != null && estimate.high != null && (
        <line class="range" x1={x(estimate.low)} x2={x(estimate.high)} y1={y} y2={y} />
      )}
      <circle cx={x(estimate.value)} cy={y} r="3.6" />
    </g>
  );
}

export function range({ value, low, high }: Estimate): string {
  return low == null || high == null ? percent(value) : `${percent(value)} (${percent(low)} to ${percent(high)})`;
}
