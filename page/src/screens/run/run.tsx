// One run: what came of it first, then how it went, then what it was.
import { Interval, range } from "../../charts/spark.tsx";
import type { RunLive } from "../../contract/run.ts";
import { ago, count, duration, money, number, percent, rough } from "../../format.ts";
import { type Followed, useRun } from "../../following.ts";
import { theSource } from "../../live.ts";
import { Loading, Outcome, Refused, useAction } from "../../parts/answers.tsx";
import { Card, Figures, Icon, Pill, TwoClicks } from "../../parts/parts.tsx";
import { Progress, StateOf } from "../../parts/runs.tsx";
import { Paragraph, Text } from "../../parts/text.tsx";
import { link } from "../../router.ts";
import { MainCurve, SmallCurves } from "./curves.tsx";
import { CrewCard, Events, FailureCard, Findings } from "./course.tsx";
import { RolloutsCard } from "./rollouts.tsx";
import { Models, SettingsCard } from "./settings.tsx";

export function RunScreen({ runId }: { runId: string }) {
  const run = useRun(runId);
  if (run.gone)
    return (
      <Card class="alert" title="This run was deleted.">
        <p>
          <code>{runId}</code> is no longer in the home folder. <a href={link("now")}>Now</a>
        </p>
      </Card>
    );
  const refused = run.refusal && <Refused refusal={run.refusal} />;
  if (!run.live) return refused ?? <Loading />;
  return (
    <>
      {refused}
      <Shown run={run} live={run.live} />
    </>
  );
}

function Shown({ run, live }: { run: Followed; live: RunLive }) {
  const compact = theSource().place === "client";
  return (
    <>
      <Head run={run} live={live} />
      {live.failure && <FailureCard failure={live.failure} runId={run.runId} />}
      {live.damage.map((one) => (
        <Card class="alert" title={<Text>{one}</Text>} />
      ))}
      <Verdict live={live} />
      {!compact && live.models.length > 0 && <Models live={live} />}
      <div class="columns">
        <div>
          <MainCurve of={run} />
          <SmallCurves of={run} />
          {live.run.kind !== "ask" && live.run.kind !== "sft" && <RolloutsCard runId={run.runId} live={live.run.live} />}
        </div>
        <div>
          <Findings live={live} />
          {live.crew.length > 0 && <CrewCard live={live} runId={run.runId} now={run.at} />}
          <Events events={run.events} before={live.events_before} />
        </div>
      </div>
      {run.fixed && <SettingsCard fixed={run.fixed} />}
    </>
  );
}

function Head({ run, live }: { run: Followed; live: RunLive }) {
  const action = useAction();
  const source = theSource();
  const item = live.run;
  const { fixed } = run;
  const facts = [fixed?.model, fixed?.algorithm, fixed && `seed ${fixed.seed}`, item.ended_at ? `ended ${ago(item.ended_at, run.at)}` : `started ${ago(item.started_at ?? item.created_at, run.at)}`];
  return (
    <>
      <header>
        <div>
          <h1>
            <Text>{item.title}</Text> <span class="detail"><Text>{item.detail}</Text></span> <StateOf run={item} />
          </h1>
          <p class="quiet">
            <code>{item.run_id}</code> {facts.filter(Boolean).map((fact) => <> · <Text>{fact}</Text></>)}
            {live.state.attempt > 1 && ` · attempt ${live.state.attempt}`}
          </p>
          {live.state.reason && <Paragraph class="quiet">{live.state.reason.foreign}</Paragraph>}
        </div>
        <div class="row">
          {source.askAgent && (
            <button type="button" onClick={() => void source.askAgent!(`What should be done next with Toprope's run ${item.run_id}?`).catch(() => undefined)}>
              Ask the agent
            </button>
          )}
          {source.enlarge && (
            <button type="button" onClick={() => void source.enlarge!()}>
              Larger
            </button>
          )}
          <a class="button" href={link("compare", { a: item.run_id })}>
            Compare
          </a>
          {live.may.resume && !source.readOnly && source.place === "browser" && (
            <button type="button" disabled={action.busy} onClick={() => action.act({ do: "resume", run_id: item.run_id })}>
              Resume
            </button>
          )}
          {live.may.stop && !source.readOnly && (
            <TwoClicks again="Click again to stop" disabled={action.busy} onConfirmed={() => void action.act({ do: "stop", run_id: item.run_id })}>
              Stop
            </TwoClicks>
          )}
        </div>
      </header>
      <Outcome of={action} />
    </>
  );
}

function Verdict({ live }: { live: RunLive }) {
  const { verdict, facts, run } = live;
  return (
    <Card class="verdict">
      <div class="words">
        {verdict?.after ? (
          <>
            <p class="big">
              {verdict.before && <span class="quiet">{percent(verdict.before.value)} → </span>}
              <span class="accent">{percent(verdict.after.value)}</span>
            </p>
            <Paragraph class="quiet small">{verdict.sentence}</Paragraph>
          </>
        ) : (
          <>
            <p class="big quiet">{verdict?.before ? `${percent(verdict.before.value)} → ` : ""}{run.live ? "not measured yet" : "not measured"}</p>
            <Paragraph class="quiet small">{verdict?.sentence ?? (run.live ? "Accuracy is measured at the end." : "The run ended before its last evaluation.")}</Paragraph>
          </>
        )}
        {run.live && <Progress run={run} />}
      </div>
      {verdict && (verdict.before || verdict.after) && (
        <div title={[verdict.before && `before ${range(verdict.before)}`, verdict.after && `after ${range(verdict.after)}`].filter(Boolean).join("; ")}>
          <Interval before={verdict.before} after={verdict.after} axis />
        </div>
      )}
      <Figures
        of={[
          ["steps", <>{count(facts.steps)}{run.live && facts.total_steps ? <span class="quiet small"> of {count(facts.total_steps)}</span> : null}</>],
          facts.rollouts != null && (["rollouts", rough(facts.rollouts)] as const),
          facts.training_s != null ? (["training", duration(facts.training_s)] as const) : (["time", duration(facts.total_s)] as const),
          ["cost", <Cost facts={facts} />],
          run.live && facts.rollouts_per_second != null && (["rollouts a second", number(facts.rollouts_per_second)] as const),
        ]}
      />
      <ul class="checks">
        {live.integrity && <li><Integrity of={live.integrity} /></li>}
        {verdict?.split === "heldout" && (
          <li>
            <Pill>
              <Icon name="lock" /> held-out sealed
            </Pill>
          </li>
        )}
      </ul>
    </Card>
  );
}

function Cost({ facts }: { facts: RunLive["facts"] }) {
  if (facts.usd != null && facts.usd >= 0.01) return <>{money(facts.usd)}</>;
  if (facts.gpu_s != null && facts.gpu_s > 0) return <>{duration(facts.gpu_s)} GPU</>;
  return <>{facts.cpu_s != null ? `${duration(facts.cpu_s)} CPU` : "–"}</>;
}

function Integrity({ of }: { of: NonNullable<RunLive["integrity"]> }) {
  const bad = of.filter((one) => one.state === "warning");
  const well = of.filter((one) => one.state === "ok").length;
  return (
    <details class="integrity">
      <summary>
        <Pill tone={bad.length ? "warn" : "good"}>
          <Icon name={bad.length ? "warning" : "tick"} /> {bad.length ? `${bad.length} of ${of.length} integrity checks warn` : `${well} integrity checks`}
        </Pill>
      </summary>
      <ul class="list small">
        {of.map((one) => (
          <li>
            <span class={one.state === "warning" ? "warn" : one.state === "ok" ? "good" : "quiet"}>{one.name.replaceAll("_", " ")}</span>: <Text>{one.what}</Text>
          </li>
        ))}
      </ul>
    </details>
  );
}
