// Curves of several runs on one axis. Their steps differ, so they are joined on all steps of all of them.
import { useMemo } from "preact/hooks";
import { Chart } from "./chart.tsx";
import type { Colour } from "./colours.ts";
import type { ChartModel, Numbers } from "./model.ts";

export interface Curve {
  label: string;
  colour: Colour;
  x: readonly number[];
  y: Numbers;
}

/** Values at the steps of all curves; null where a curve has none. */
export function joinedCurves(curves: readonly Curve[]): ChartModel {
  const x = [...new Set(curves.flatMap((curve) => [...curve.x]))].sort((a, b) => a - b);
  const lines = curves.map(({ label, colour, ...curve }) => {
    const at = new Map(curve.x.map((step, i) => [step, curve.y[i] ?? null]));
    return { label, colour, mean: x.map((step) => at.get(step) ?? null) };
  });
  const all = lines.flatMap((line) => line.mean).filter((value) => value != null);
  return { x, lines, share: all.every((value) => value >= 0 && value <= 1) };
}

export function Overlay({ title, curves, height }: { title: string; curves: readonly Curve[]; height: number }) {
  const model = useMemo(() => joinedCurves(curves), [curves]);
  return <Chart title={title} model={model} height={height} />;
}
