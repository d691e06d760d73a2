// The curves of a run: which columns stand together, in which units, with which marks.
import { useMemo } from "preact/hooks";
import { Chart } from "../../charts/chart.tsx";
import type { Colour } from "../../charts/colours.ts";
import { type ChartModel, type Line, type Point, type Span, thinned } from "../../charts/model.ts";
import type { Evaluation, RunLive, Series } from "../../contract/run.ts";
import { count, plural } from "../../format.ts";
import { Card, Tabs } from "../../parts/parts.tsx";
import { choose, currentRoute, link, listed, setListed, useRoute } from "../../router.ts";
import type { Followed } from "../../following.ts";
import { plain } from "../../parts/text.tsx";

/** A step at which a run was not rewound may show its evaluation; before and after stand at the ends. */
function pointsOf(evaluations: Evaluation[], series: Series): Point[] {
  const [first, last] = [series.x[0] ?? 0, series.last_step];
  return evaluations.flatMap((one) => {
    const share = one.sampled ?? one.greedy;
    if (!share) return [];
    const x = one.step ?? (one.label.startsWith("before") ? Math.min(first, 1) - 1 : last);
    return [{ x, y: share.value, low: share.low, high: share.high, label: `${one.label} (${one.split})` }];
  });
}

function spansOf(live: RunLive): Span[] {
  return live.findings
    .filter((finding) => finding.from_step != null)
    .map((finding) => ({
      from: finding.from_step!,
      to: finding.to_step,
      level: finding.level,
      label: finding.rule.replaceAll("_", " "),
    }));
}

function lineOf(series: Series, name: string, label: string, colour: Colour, stacked = false): Line | null {
  const column = series.columns[name];
  if (!column) return null;
  return stacked ? { label, colour, mean: column.mean, stacked } : { label, colour, ...column };
}

function isShare(series: Series, name: string): boolean {
  const column = series.columns[name];
  return Boolean(column) && [...column!.low, ...column!.high].every((value) => value == null || (value >= 0 && value <= 1));
}

/** Points of a large and of a small curve; more would only be noise in so many pixels. */
const LARGE = 200;
const LITTLE = 100;

/** Curves that may be the large one, in order of preference. */
const MAIN = [
  ["reward", "Reward"],
  ["success", "Success"],
  ["loss", "Loss"],
  ["mean_token_accuracy", "Token accuracy"],
] as const;

export function MainCurve({ of }: { of: Followed }) {
  const { at } = useRoute();
  const { series, live } = of;
  const names = MAIN.filter(([name]) => series?.columns[name]);
  const sft = live?.run.kind === "sft";
  const preferred = sft ? "loss" : "reward";
  const chosen = names.find(([name]) => name === at.curve) ?? names.find(([name]) => name === preferred) ?? names[0];
  const zoom = zoomOf(at);
  const model = useMemo<ChartModel | null>(() => {
    if (!series || !live || !chosen) return null;
    const share = chosen[0] !== "loss" && isShare(series, chosen[0]);
    const whole = {
      x: series.x,
      lines: [lineOf(series, chosen[0], chosen[1].toLowerCase(), "blue")!],
      share,
      points: share && !sft ? pointsOf(live.evaluations, series) : [],
      spans: spansOf(live),
      checkpoints: live.checkpoints.map((one) => one.step),
    };
    // A part of the axis has room for every point.
    return zoom ? whole : thinned(whole, LARGE);
  }, [series, chosen?.[0], live?.evaluations, live?.findings, live?.checkpoints, zoom === null]);
  if (!model || !series || !chosen) return null;
  const steps = series.width * (zoom ? 1 : Math.ceil(series.x.length / LARGE));
  const each = steps > 1 ? `each point the mean of ${count(steps)} steps, the band their range` : "each point one step";
  return (
    <Card title={`${chosen[1]} over steps`} note={series.complete ? `${plural(series.rows, "step")}, ${each}` : "a sample, while all steps are read"} class="maincurve">
      <div class="row">
        <ul class="keys">
          <li>
            <i class="key" /> {chosen[1].toLowerCase()}
          </li>
          {Boolean(model.points?.length) && (
            <li>
              <i class="key ring" /> evaluation, 95 % interval
            </li>
          )}
          {Boolean(model.checkpoints?.length) && (
            <li>
              <i class="key tick" /> checkpoint
            </li>
          )}
          {Boolean(model.spans?.length) && (
            <li>
              <i class="key shade" /> finding
            </li>
          )}
        </ul>
        <span class="push" />
        {zoom && (
          <button type="button" onClick={() => choose({ from: null, to: null })}>
            Show all steps
          </button>
        )}
        {names.length > 1 && (
          <Tabs
            label="Curve"
            chosen={chosen[0]}
            of={names.map(([name, words]) => [name, words, link(currentRoute().path, { ...at, curve: name === preferred ? null : name })])}
          />
        )}
      </div>
      <Chart
        title={`${chosen[1]} over steps`}
        model={model}
        height={270}
        zoom={zoom}
        onZoom={(range) => choose({ from: range && String(range[0]), to: range && String(range[1]) })}
        tableOpen={listed(at, "table", "main")}
        onTable={(open) => setListed("table", "main", open)}
      />
    </Card>
  );
}

function zoomOf(at: Readonly<Record<string, string>>): readonly [number, number] | null {
  const [from, to] = [Number(at.from), Number(at.to)];
  return at.from && at.to && Number.isFinite(from) && Number.isFinite(to) && to > from ? [from, to] : null;
}

interface Small {
  title: string;
  unit: string;
  lines: readonly (readonly [string, string, Colour])[];
  stacked?: boolean;
  share?: boolean;
}

const PARTS = ["blue", "orange", "green", "violet", "red", "grey"] as const;

/** Small curves, the most telling first. Those without a column are left out. */
const SMALL: readonly Small[] = [
  { title: "Entropy", unit: "nats", lines: [["entropy", "entropy", "blue"]] },
  { title: "Policy moved", unit: "nats", lines: [["moved", "moved", "orange"]] },
  { title: "Groups without signal", unit: "", share: true, lines: [["all_right", "all right", "green"], ["all_wrong", "all wrong", "red"]] },
  { title: "Answer length", unit: "tokens", lines: [["length", "mean length", "green"]] },
  { title: "Staleness", unit: "versions", lines: [["staleness", "staleness", "violet"]] },
  {
    title: "Time of a step",
    unit: "s",
    stacked: true,
    lines: [["time_passes", "passes", "blue"], ["time_wait", "wait", "orange"], ["time_prepare", "prepare", "violet"], ["time_rest", "rest", "green"]],
  },
  { title: "Token accuracy", unit: "", share: true, lines: [["mean_token_accuracy", "token accuracy", "green"]] },
  { title: "Gradient norm", unit: "", lines: [["grad_norm", "gradient norm", "violet"]] },
  { title: "Parts of the reward", unit: "", share: true, lines: PARTS.map((colour, i) => [`part:${i}`, `part ${i}`, colour] as const) },
  { title: "Learning rate", unit: "", lines: [["learning_rate", "learning rate", "grey"]] },
  { title: "Success", unit: "", share: true, lines: [["success", "success", "blue"]] },
  { title: "Loss", unit: "", lines: [["loss", "loss", "blue"]] },
  { title: "KL to the start", unit: "nats", lines: [["kl", "KL", "orange"]] },
  { title: "KL of an update", unit: "nats", lines: [["approx_kl", "approximate KL", "orange"]] },
  { title: "Spread of rewards", unit: "", lines: [["reward_std", "standard deviation", "blue"]] },
  { title: "Clipped", unit: "", share: true, lines: [["clipped", "clipped", "red"]] },
  { title: "Log-probability gap", unit: "nats", lines: [["logp_difference", "difference", "violet"]] },
  { title: "Truncated answers", unit: "", share: true, lines: [["truncated", "truncated", "red"]] },
  { title: "Unreadable answers", unit: "", share: true, lines: [["parse_failures", "parse failures", "red"]] },
  { title: "Longest answer", unit: "tokens", lines: [["length_max", "longest", "green"]] },
  { title: "Errors", unit: "", share: true, lines: [["errors", "errors", "red"]] },
  { title: "Rollouts a second", unit: "1/s", lines: [["rollouts_per_second", "rollouts a second", "green"]] },
  { title: "Groups waiting", unit: "", lines: [["waiting", "waiting", "grey"]] },
  { title: "Value explained", unit: "", lines: [["value_explained", "explained variance", "blue"]] },
];
const FIRST = 6;

export function SmallCurves({ of }: { of: Followed }) {
  const { at, path } = useRoute();
  const { series } = of;
  if (!series) return null;
  const sft = of.live?.run.kind === "sft";
  const there = SMALL.filter((one) => one.lines.some(([name]) => series.columns[name]) && !(sft && one.title === "Loss"));
  const all = at.curves === "all";
  return (
    <>
      <div class="grid small">
        {(all ? there : there.slice(0, FIRST)).map((one) => (
          <SmallCurve key={one.title} small={one} series={series} />
        ))}
      </div>
      {there.length > FIRST && (
        <p>
          <a class="quiet small page" href={link(path, { ...at, curves: all ? null : "all" })}>
            {all ? "Six curves" : `All ${there.length} curves`}
          </a>
        </p>
      )}
    </>
  );
}

function SmallCurve({ small, series }: { small: Small; series: Series }) {
  const { at } = useRoute();
  const model = useMemo<ChartModel>(
    () =>
      thinned({
      x: series.x,
      lines: small.lines.map(([name, label, colour]) => lineOf(series, name, plain(series.names?.[name]?.foreign ?? label), colour, small.stacked)).filter((line) => line !== null),
      share: small.share && small.lines.every(([name]) => !series.columns[name] || isShare(series, name)),
    }, LITTLE),
    [series],
  );
  return (
    <Card title={small.title} note={small.unit} class="smallcurve">
      {model.lines.length > 1 && (
        <ul class="keys">
          {model.lines.map((line) => (
            <li>
              <i class={`key ${line.colour}`} /> {line.label}
            </li>
          ))}
        </ul>
      )}
      <Chart
        title={small.title}
        model={model}
        height={116}
        small
        tableOpen={listed(at, "table", small.title)}
        onTable={(open) => setListed("table", small.title, open)}
      />
    </Card>
  );
}
