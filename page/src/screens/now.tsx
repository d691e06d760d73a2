// What needs the owner, what runs, what was reached, what the agent did.
import { Interval } from "../charts/spark.tsx";
import type { Ask, Call, Change, Now as NowAnswer } from "../contract/common.ts";
import { ago, clock, count, duration, money, percent, plural, quantity } from "../format.ts";
import { theSource, useAnswer } from "../live.ts";
import { Answered, Outcome, useAction } from "../parts/answers.tsx";
import { Card, Figures, Nothing } from "../parts/parts.tsx";
import { LiveCard, runLink } from "../parts/runs.tsx";
import { Paragraph, Text } from "../parts/text.tsx";
import { link, useRoute } from "../router.ts";
import { RopeCard } from "./rope.tsx";

const nowChanged = (change: Change) => Boolean(change.list || change.asks || change.diary || change.runs || change.limits || change.locks);

/** Asked by the navigation too, for what waits; one request serves both. */
export function useNow() {
  return useAnswer<NowAnswer>({ what: "now" }, nowChanged, 3000);
}

export function NowScreen() {
  return (
    <Answered of={useNow()}>
      {(now) => (
        <>
          <h1 class="unheard">Now</h1>
          {now.frozen && (
            <Card class="alert" title="Starts are frozen">
              <p>
                <Text>{now.frozen.reason.foreign}</Text> <span class="quiet">since {clock(now.frozen.at)}; 'toprope thaw' allows them again.</span>
              </p>
            </Card>
          )}
          {now.waiting.map((ask) => (
            <Waiting key={ask.hash} ask={ask} at={now.at} mayAct={now.may_act} />
          ))}
          {now.live.length ? (
            <div class="grid wide">
              {now.live.map((run) => (
                <LiveCard key={run.run_id} run={run} />
              ))}
            </div>
          ) : (
            <Resting now={now} />
          )}
          <div class="columns">
            <div>
              <Best now={now} />
              {theSource().place === "browser" && <Diary calls={now.diary} />}
            </div>
            <div>
              <RopeCard rope={now.rope} />
            </div>
          </div>
        </>
      )}
    </Answered>
  );
}

function Resting({ now }: { now: NowAnswer }) {
  const { runs, cpu_hours, gpu_hours, cost_usd } = now.today;
  const used = [
    cpu_hours > 0 && `${duration(cpu_hours * 3600)} of CPU`,
    gpu_hours > 0 && `${duration(gpu_hours * 3600)} of GPU`,
    cost_usd != null && cost_usd > 0 && money(cost_usd),
  ].filter(Boolean);
  return (
    <Card class="resting">
      <p class="strong">Nothing is running.</p>
      <p class="quiet">
        {now.last_end ? `The last run ended ${ago(now.last_end, now.at)}. ` : now.counts.runs ? "No run has ended yet. " : "No run yet: 'toprope clients' tells how to connect an agent."}
        {runs > 0 && `${plural(runs, "run")} today${used.length ? `, ${used.join(", ")}` : ""}.`}
      </p>
    </Card>
  );
}

/** A start that waits for the owner: what it may use, and the two answers. */
function Waiting({ ask, at, mayAct }: { ask: Ask; at: number; mayAct: boolean }) {
  const action = useAction();
  const { details } = ask;
  const caps = details ? Object.entries(details.caps).filter(([name]) => name !== "cost_usd" && name !== "steps") : [];
  const cost = details?.estimates.cost_usd ?? null;
  const time = details?.estimates.wall_hours ?? null;
  return (
    <Card class="asked">
      <h2>{details ? <Text>{[details.what, details.environment, details.draft_id].filter(Boolean).join(" · ")}</Text> : "A start waits for you"}</h2>
      {!details && <Paragraph>{ask.text}</Paragraph>}
      {details?.why && <Paragraph>{details.why}</Paragraph>}
      {details?.changes && (
        <p>
          <code>
            <Text>{details.changes}</Text>
          </code>
        </p>
      )}
      <p class="quiet small">
        <code>{ask.hash.slice(0, 12)}</code> · asked {ago(ask.at, at)}, lapses in {duration(ask.expires_at - at)}
      </p>
      <div class="row">
        {details && (
          <Figures
            of={[
              ["runs", count(details.runs)],
              details.steps > 0 && (["steps at most", count(details.steps)] as const),
              caps.length > 0 && (["stopped at", caps.map(([name, cap]) => quantity(name, cap)).join(", ")] as const),
              [details.caps.cost_usd != null ? "cost at most" : "cost, estimated up to", details.caps.cost_usd != null ? money(details.caps.cost_usd) : cost ? money(cost.high) : "not known"],
              ["time", time ? [...new Set([time.low, time.high].map((hours) => duration(hours * 3600)))].join(" to ") : "not measured yet"],
            ]}
          />
        )}
        {ask.approved ? (
          <p class="good strong">Allowed; it waits for the agent to start it.</p>
        ) : (
          mayAct && (
            <div class="row">
              <button type="button" class="first" disabled={action.busy} onClick={() => action.act({ do: "answer", hash: ask.hash, answer: "approve" })}>
                Allow this start
              </button>
              <button type="button" disabled={action.busy} onClick={() => action.act({ do: "answer", hash: ask.hash, answer: "refuse" })}>
                Refuse
              </button>
            </div>
          )
        )}
      </div>
      <Outcome of={action} />
    </Card>
  );
}

function Best({ now }: { now: NowAnswer }) {
  return (
    <Card title="Best so far" note="held-out accuracy, 95 % intervals; hollow: before">
      {now.best.length === 0 && <Nothing>No run has a held-out accuracy yet. Held-out tasks are measured at the end of a run.</Nothing>}
      <ul class="best">
        {now.best.map(({ run, before, accuracy }) => (
          <li key={run.run_id}>
            <a href={runLink(run)} class="cut">
              <span class="strong">
                <Text>{run.title}</Text>
              </span>{" "}
              <span class="quiet small">
                <Text>{run.detail}</Text>
              </span>
            </a>
            <Interval before={before} after={accuracy} />
            <span class="strong value">{percent(accuracy.value)}</span>
          </li>
        ))}
      </ul>
    </Card>
  );
}

const SHOWN = 14;

function Diary({ calls }: { calls: Call[] }) {
  const { at } = useRoute();
  const all = at.diary === "all";
  const shown = all ? calls : calls.slice(0, SHOWN);
  return (
    <Card title="Diary" note="what the agent called, and what it was told">
      {calls.length === 0 && <Nothing>No call yet. Each call of a tool and each command is written here.</Nothing>}
      <ol class="list diary">
        {shown.map((call) => (
          <Entry key={call.n} call={call} />
        ))}
      </ol>
      {calls.length > SHOWN && (
        <p class="more">
          <a class="page" href={link("now", { diary: all ? null : "all" })}>{all ? "Fewer" : `${calls.length - SHOWN} more`}</a>
        </p>
      )}
    </Card>
  );
}

function Entry({ call }: { call: Call }) {
  const failed = call.outcome === "refused" || call.outcome === "failed";
  const [run] = call.run_ids;
  const said = <Text>{call.said?.foreign.replaceAll("->", "→") ?? call.outcome}</Text>;
  return (
    <li>
      <time class="mono quiet">{clock(call.at)}</time>
      <div>
        <p class="row call">
          <code class={`strong ${failed ? "bad" : ""}`}>
            <Text>{call.tool.foreign}</Text>
          </code>
          <code class="cut quiet">
            <Text>{call.arguments.foreign}</Text>
          </code>
          <span class="quiet small push">{call.ms == null ? "" : duration(call.ms / 1000)}</span>
        </p>
        {(call.said || call.outcome !== "done") && (
          <p class={`said ${failed ? "bad" : "quiet"}`}>
            {call.outcome === "asked" && <span class="warn">waits for you: </span>}
            {run ? <a href={link(["run", run])}>{said}</a> : said}
          </p>
        )}
      </div>
    </li>
  );
}
