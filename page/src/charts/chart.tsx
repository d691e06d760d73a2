// A chart: uPlot for curves and axes, our marks above and below them, a reading for the keyboard, a table underneath.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { count, number, percent } from "../format.ts";
import { plain } from "../parts/text.tsx";
import { colours, usePalette } from "./colours.ts";
import { drawAbove, drawBelow } from "./draw.ts";
import { type ChartModel, extent } from "./model.ts";
import { ChartTable } from "./table.tsx";

interface Props {
  title: string;
  model: ChartModel;
  height: number;
  /** Small charts have fewer labels on their axes. */
  small?: boolean;
  /** The chosen part of the x axis, which the address keeps. */
  zoom?: readonly [number, number] | null;
  onZoom?: (zoom: readonly [number, number] | null) => void;
  tableOpen?: boolean;
  onTable?: (open: boolean) => void;
}

export function Chart(props: Props) {
  const { model, title, height, small, zoom } = props;
  const palette = usePalette();
  const place = useRef<HTMLDivElement>(null);
  const reading = useRef<HTMLOutputElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const visible = useRef(true);
  const stale = useRef(false);
  const [empty, setEmpty] = useState(false);

  // What uPlot has to be built anew for: its series and its colours. New rows only change the data.
  const shape = model.lines.map((line) => `${line.label}:${line.colour}:${line.stacked ? 1 : 0}`).join("|");
  useLayoutEffect(() => {
    const node = place.current!;
    const made = new uPlot(options(latest, reading, node.clientWidth || 300), dataOf(latest.current.model), node);
    plot.current = made;
    const sizes = new ResizeObserver(() => {
      const width = node.clientWidth;
      if (width && Math.abs(width - made.width) > 1) made.setSize({ width, height: latest.current.height });
    });
    sizes.observe(node);
    const sight = new IntersectionObserver((seen) => {
      visible.current = seen.some((one) => one.isIntersecting);
      if (visible.current && stale.current) show(made, latest.current, stale);
    });
    sight.observe(node);
    return () => {
      sizes.disconnect();
      sight.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape, palette, height, small, model.share]);

  const drawn = useRef<unknown>(null);
  useEffect(() => {
    const made = plot.current;
    if (!made || drawn.current === model) return;
    const first = drawn.current === null;
    drawn.current = model;
    setEmpty(model.x.length === 0);
    if (first) return;
    // A chart that nobody sees is drawn when it comes into view.
    if (visible.current) show(made, props, stale);
    else stale.current = true;
  }, [model]);

  useEffect(() => {
    const made = plot.current;
    if (made) setRange(made, latest.current);
  }, [zoom?.[0], zoom?.[1], shape, palette]);

  return (
    <figure class={`chart ${small ? "small" : ""}`}>
      <div
        class="plot"
        ref={place}
        role="img"
        tabIndex={0}
        aria-label={plain(`${title}: ${summary(model)}. Arrow keys read its points.`)}
        onKeyDown={(event) => moved(event, plot.current, latest.current)}
        onBlur={() => plot.current?.setCursor({ left: -10, top: -10 })}
      />
      {empty && <p class="nothing over">No rows yet.</p>}
      <output class="reading" ref={reading} />
      <ChartTable title={title} model={model} open={props.tableOpen} onOpen={props.onTable} />
    </figure>
  );
}

function show(made: uPlot, props: Props, stale: { current: boolean }): void {
  stale.current = false;
  made.batch(() => {
    made.setData(dataOf(props.model), false);
    setRange(made, props);
  });
}

function setRange(made: uPlot, { model, zoom }: Props): void {
  const [from, to] = zoom ?? whole(model);
  const [low, high] = extent(model, from, to);
  made.batch(() => {
    made.setScale("x", { min: from, max: to });
    made.setScale("y", { min: low, max: high });
  });
}

function whole(model: ChartModel): [number, number] {
  const marks = [...(model.points ?? []).map((point) => point.x), ...(model.checkpoints ?? [])];
  const first = Math.min(model.x[0] ?? Infinity, ...marks);
  const last = Math.max(model.x.at(-1) ?? -Infinity, ...marks);
  if (first > last) return [0, 1];
  return first === last ? [first - 1, last + 1] : [first, last];
}

function dataOf(model: ChartModel): uPlot.AlignedData {
  const below: number[] = [];
  const lines = model.lines.map((line) => {
    if (!line.stacked) return line.mean as (number | null)[];
    return line.mean.map((value, i) => (below[i] = (below[i] ?? 0) + (value ?? 0)));
  });
  // uPlot paints in order, so the tallest of a stack comes first in `options`, and here too.
  if (model.lines.some((line) => line.stacked)) lines.reverse();
  return [model.x as number[], ...lines] as uPlot.AlignedData;
}

function options(props: { current: Props }, reading: { current: HTMLOutputElement | null }, width: number): uPlot.Options {
  const { model, small, height } = props.current;
  const palette = colours();
  const lines = model.lines.some((line) => line.stacked) ? [...model.lines].reverse() : model.lines;
  const [low, high] = extent(model, ...(props.current.zoom ?? whole(model)));
  const [from, to] = props.current.zoom ?? whole(model);
  const axis = {
    stroke: palette.quiet,
    font: palette.font,
    grid: { stroke: palette.grid, width: 1 },
    ticks: { show: false },
    border: { show: false },
  };
  return {
    width,
    height,
    padding: [8, 16, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      drag: { x: Boolean(props.current.onZoom), y: false, setScale: false },
      points: { size: 7, width: 2, fill: palette.card },
    },
    scales: { x: { time: false, auto: false, min: from, max: to }, y: { auto: false, min: low, max: high } },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 26,
        gap: 4,
        space: small ? 56 : 90,
        incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 2500, 5e3, 1e4, 2e4, 25e3, 5e4, 1e5, 2e5, 25e4, 5e5, 1e6],
        values: (_, ticks) => ticks.map((tick) => count(tick)),
      },
      {
        ...axis,
        size: small ? 44 : 50,
        gap: 6,
        space: small ? 30 : 44,
        values: (_, ticks) => ticks.map((tick) => (model.share ? percent(tick, 0) : number(tick))),
      },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: palette.of(line.colour),
        width: small ? 1.25 : 1.75,
        fill: line.stacked ? palette.soft(line.colour, 0.9) : undefined,
        // A value alone has no line.
        points: { show: (u: uPlot, i: number) => u.data[0].length < 30 || (u.data[i] as unknown[]).filter((value) => value != null).length < 2, size: 4 },
        spanGaps: true,
      })),
    ],
    hooks: {
      drawAxes: [(u) => drawBelow(u, props.current.model)],
      draw: [(u) => drawAbove(u, props.current.model)],
      setCursor: [(u) => read(u, props.current.model, reading.current)],
      setSelect: [
        (u) => {
          if (u.select.width < 8) return;
          const ends = [u.select.left, u.select.left + u.select.width].map((at) => Math.round(u.posToVal(at, "x")));
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (ends[1]! > ends[0]!) props.current.onZoom?.([ends[0]!, ends[1]!]);
        },
      ],
    },
  };
}

/** Write what is under the cursor. */
function read(u: uPlot, model: ChartModel, output: HTMLOutputElement | null): void {
  if (!output) return;
  const i = u.cursor.idx;
  output.textContent = i == null || (u.cursor.left ?? -1) < 0 ? "" : `step ${count(model.x[i])}: ${valuesAt(model, i)}`;
}

function valuesAt(model: ChartModel, i: number): string {
  const shown = model.share ? (value: number | null | undefined) => percent(value) : number;
  return model.lines
    .map((line) => {
      const range = line.low && line.low[i] !== line.high?.[i] ? ` (${shown(line.low[i])} to ${shown(line.high?.[i])})` : "";
      return `${model.lines.length > 1 ? `${line.label} ` : ""}${shown(line.mean[i])}${range}`;
    })
    .join(", ");
}

function summary(model: ChartModel): string {
  const last = model.x.length - 1;
  if (last < 0) return "no rows yet";
  return `from ${valuesAt(model, 0)} at step ${count(model.x[0])} to ${valuesAt(model, last)} at step ${count(model.x[last])}`;
}

function moved(event: KeyboardEvent, u: uPlot | null, props: Props): void {
  if (!u) return;
  const { x } = props.model;
  const jump = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -x.length, End: x.length }[event.key];
  if (event.key === "Escape" && props.zoom) props.onZoom?.(null);
  if (jump === undefined || !x.length) return;
  event.preventDefault();
  const now = (u.cursor.left ?? -1) < 0 ? (jump > 0 ? -1 : x.length) : (u.cursor.idx ?? 0);
  const next = Math.min(Math.max(now + jump, 0), x.length - 1);
  u.setCursor({ left: u.valToPos(x[next]!, "x"), top: 10 });
}
