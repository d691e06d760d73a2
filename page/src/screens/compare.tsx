// Two sides, each a run or the seeds of one: curves above each other, the paired verdict and what it rests on.
import { useMemo } from "preact/hooks";
import { Overlay } from "../charts/overlay.tsx";
import { Interval } from "../charts/spark.tsx";
import type { Comparison, Judged, Side } from "../contract/work.ts";
import { count, duration, money, number, percent } from "../format.ts";
import { useAnswer } from "../live.ts";
import { Answered } from "../parts/answers.tsx";
import { Card, Figures, Nothing, Pill } from "../parts/parts.tsx";
import { RunLine } from "../parts/runs.tsx";
import { Paragraph, Text } from "../parts/text.tsx";
import { choose, useRoute } from "../router.ts";
import { useRuns } from "../side.tsx";

const ids = (text: string | undefined) => (text ?? "").split(",").filter(Boolean);

export function CompareScreen() {
  const { at } = useRoute();
  const [a, b] = [ids(at.a), ids(at.b)];
  const asked = useAnswer<Comparison>(a.length && b.length ? { what: "compare", a, b } : null, (change) => Boolean(change.list));
  return (
    <>
      <header>
        <h1>Compare</h1>
      </header>
      <Sides a={a} b={b} />
      {a.length > 0 && b.length > 0 ? (
        <Answered of={asked}>{(answer) => <Compared of={answer} />}</Answered>
      ) : (
        <Nothing>Choose a run for each side. Several runs of a side count as its seeds.</Nothing>
      )}
    </>
  );
}

/** The chosen runs of both sides; choosing changes the address. */
function Sides({ a, b }: { a: string[]; b: string[] }) {
  const { answer } = useRuns(useRoute());
  const listed = (answer?.runs ?? []).filter((run) => ["train", "sft", "test"].includes(run.kind));
  const side = (name: "a" | "b", chosen: string[]) => (
    <Card title={name === "a" ? "Side a" : "Side b"}>
      <ul class="list">
        {chosen.map((id) => {
          const run = listed.find((one) => one.run_id === id);
          return (
            <li class="row" key={id}>
              <i class={`key ${name === "a" ? "" : "orange"}`} />
              <span class="cut grow">{run ? <Text>{`${run.title} ${run.detail}`}</Text> : <code>{id}</code>}</span>
              <button type="button" class="bare push" onClick={() => choose({ [name]: chosen.filter((one) => one !== id).join(",") })}>
                Remove<span class="unheard"> {id}</span>
              </button>
            </li>
          );
        })}
      </ul>
      <select
        aria-label={`Add a run to side ${name}`}
        value=""
        onChange={(event) => event.currentTarget.value && choose({ [name]: [...chosen, event.currentTarget.value].join(",") })}
      >
        <option value="">Add a run …</option>
        {listed
          .filter((run) => !a.includes(run.run_id) && !b.includes(run.run_id))
          .map((run) => (
            <option value={run.run_id}>{`${run.title} ${run.detail} (${run.run_id})`}</option>
          ))}
      </select>
    </Card>
  );
  return (
    <>
      <div class="pair">
        {side("a", a)}
        {side("b", b)}
      </div>
      {PLACE === "browser" && answer?.next_cursor && <p class="quiet small">Search at the side to choose among older runs.</p>}
    </>
  );
}

function Compared({ of }: { of: Comparison }) {
  const curves = useMemo(
    () =>
      of.runs.flatMap(({ run, side, series }) =>
        series ? [{ label: `${side}: ${run.title} ${run.detail}`.trim(), colour: side === "a" ? ("blue" as const) : ("orange" as const), x: series.x, y: series.reward }] : [],
      ),
    [of],
  );
  return (
    <>
      {of.problem && (
        <Card class="asked" title="No paired verdict">
          <Paragraph>{of.problem.message}</Paragraph>
          <Paragraph class="quiet">{of.problem.hint}</Paragraph>
        </Card>
      )}
      {of.sampled && <Verdict of={of.sampled} title="Sampled answers" all={of} />}
      {of.greedy && <Verdict of={of.greedy} title="Greedy answers" all={of} />}
      {curves.length > 0 && (
        <Card title={`${of.measure} over steps`}>
          <ul class="keys">
            {curves.map((curve) => (
              <li>
                <i class={`key ${curve.colour}`} /> <Text>{curve.label}</Text>
              </li>
            ))}
          </ul>
          <Overlay title={`${of.measure} over steps`} curves={curves} height={270} />
        </Card>
      )}
      <Card title="Runs" note="accuracy with 95 % intervals; hollow: before">
        <ul class="list">
          {of.runs.map(({ run, side }) => (
            <li key={run.run_id} class="forest">
              <i class={`key ${side === "a" ? "" : "orange"}`} />
              <RunLine run={run} now={of.at} />
              <Interval before={run.before == null ? null : { value: run.before }} after={run.accuracy} />
            </li>
          ))}
        </ul>
        {of.remarks.map((remark) => (
          <Paragraph class="quiet small">{remark}</Paragraph>
        ))}
      </Card>
      {!of.problem && (
        <div class="pair">
          <Cost side={of.a} name="a" />
          <Cost side={of.b} name="b" />
        </div>
      )}
    </>
  );
}

const WORDS = { a: "Side a is better", b: "Side b is better", none: "No difference shown" } as const;
const points = (value: number) => percent(value).replace("%", "points");
const signed = (value: number | null) => `${value! > 0 ? "+" : value! < 0 ? "−" : ""}${points(Math.abs(value ?? NaN))}`;

function Verdict({ of, title, all }: { of: Judged; title: string; all: Comparison }) {
  return (
    <Card title={title} note={all.tasks != null ? `${count(all.tasks)} common ${all.split ?? "tasks"}, paired` : undefined}>
      <p class="big">
        <Pill tone={of.verdict === "none" ? "" : "good"}>{WORDS[of.verdict]}</Pill> <span class="accent">{signed(of.difference.value)}</span>{" "}
        <span class="quiet small">
          b minus a; {signed(of.difference.low)} to {signed(of.difference.high)}
        </span>
      </p>
      <Paragraph>{of.why}</Paragraph>
      <div class="forest-of-two">
        <span>a</span> <Interval after={{ value: of.a.mean, low: of.a.low, high: of.a.high }} /> <span class="strong">{percent(of.a.mean)}</span>
        <span>b</span> <Interval after={{ value: of.b.mean, low: of.b.low, high: of.b.high }} /> <span class="strong">{percent(of.b.mean)}</span>
      </div>
      <Figures
        of={[
          of.noise_floor != null && (["noise floor", <span title={of.floor_basis ?? ""}>{points(of.noise_floor)}</span>] as const),
          of.p_tasks != null && (["p over tasks", number(of.p_tasks)] as const),
          of.effect_h != null && (["effect (Cohen's h)", number(of.effect_h)] as const),
          of.tasks_only_a != null && (["only a right", count(of.tasks_only_a)] as const),
          of.tasks_only_b != null && (["only b right", count(of.tasks_only_b)] as const),
          of.tasks_needed != null && (["tasks needed", count(of.tasks_needed)] as const),
          of.seeds_needed != null && (["seeds needed", count(of.seeds_needed)] as const),
        ]}
      />
      {of.rests_on.length > 0 && (
        <ul class="quiet small rests">
          {of.rests_on.map((one) => (
            <li>
              <Text>{one}</Text>
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

function Cost({ side, name }: { side: Side; name: string }) {
  const known = Object.entries(side.cost ?? {}).filter((one): one is [string, number] => typeof one[1] === "number" && one[1] > 0);
  return (
    <Card title={`Cost of side ${name}`}>
      {known.length === 0 && <Nothing>Not measured.</Nothing>}
      <Figures
        of={known.map(([quantity, value]) => [
          quantity.replace(/_(s|seconds|hours)$/, "").replaceAll("_", " "),
          /_s$|seconds$/.test(quantity) ? duration(value) : quantity.endsWith("hours") ? duration(value * 3600) : quantity.includes("usd") ? money(value) : number(value),
        ])}
      />
    </Card>
  );
}
