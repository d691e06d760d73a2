// A run in a line, a card or a pill: the same words and colours on every screen.
import { count, duration, percent } from "../format.ts";
import type { RunItem, State } from "../contract/common.ts";
import { Spark } from "../charts/spark.tsx";
import { link, type Route } from "../router.ts";
import { Bar, Pill, type Tone } from "./parts.tsx";
import { Paragraph, Text } from "./text.tsx";

const TONES: Partial<Record<State, Tone>> = { completed: "blue", failed: "bad", lost: "bad", stopped: "", paused: "warn", stopping: "warn" };

export function StateOf({ run }: { run: Pick<RunItem, "state" | "live"> }) {
  return <Pill tone={TONES[run.state] ?? (run.live ? "good" : "")}>{run.state}</Pill>;
}

/** The screen of a run; a sweep has one of its own. The search stays. */
export function runLink(run: Pick<RunItem, "run_id" | "kind">, at: Route["at"] = {}): string {
  return link([run.kind === "sweep" ? "sweep" : "run", run.run_id], { find: at.find, runs: at.runs });
}

export function dotOf(run: RunItem): string {
  if (run.state === "failed" || run.state === "lost" || (!run.live && run.finding?.level === "critical")) return "bad";
  if (run.state === "paused" || (run.live && run.finding?.level === "critical")) return "wait";
  return run.live ? "live" : "";
}

/** One line that names a run and links to it, with its accuracy. */
export function RunLine({ run, now }: { run: RunItem; now: number }) {
  return (
    <a href={runLink(run)} class="runline" title={run.run_id}>
      <span class={`dot ${dotOf(run)}`} />
      <span class="cut">
        <span class="strong">
          <Text>{run.title}</Text>
        </span>{" "}
        <span class="quiet small">
          <Text>{run.detail}</Text>
        </span>
      </span>
      <span class="quiet small push">{run.live ? run.state : `${duration(now - (run.ended_at ?? run.created_at))} ago`}</span>
      <span class="strong">{run.accuracy ? percent(run.accuracy.value) : ""}</span>
    </a>
  );
}

/** How far a run is: a bar, the steps, the time that is left. */
export function Progress({ run }: { run: RunItem }) {
  const { step, total_steps, eta_s, share, what, done, total } = run.progress;
  const part = share ?? (step != null && total_steps ? step / total_steps : done != null && total ? done / total : null);
  const words = [
    step != null && `step ${count(step)}${total_steps ? ` of ${count(total_steps)}` : ""}`,
    step == null && done != null && `${what ?? "done"} ${count(done)}${total ? ` of ${count(total)}` : ""}`,
    eta_s != null && run.live && `${duration(eta_s)} left`,
  ].filter(Boolean);
  return (
    <div class="progress">
      {part != null && <Bar share={part} label="Part of the run that is done" />}
      <span class="quiet small">{words.join(" · ") || run.state}</span>
    </div>
  );
}

/** A live run as a card: its curve, how far it is, what was found. */
export function LiveCard({ run }: { run: RunItem }) {
  const { reward, success } = run.progress;
  return (
    <a class="card livecard" href={runLink(run)}>
      <div class="row">
        <span class={`dot ${dotOf(run)}`} />
        <span class="strong cut">
          <Text>{run.title}</Text>
        </span>
        <StateOf run={run} />
        <span class="push strong">{success != null ? percent(success) : reward != null ? percent(reward) : ""}</span>
      </div>
      <Paragraph class="quiet small cut">{run.detail || run.run_id}</Paragraph>
      {run.spark && <Spark values={run.spark} bad={run.finding?.level === "critical"} wide />}
      <Progress run={run} />
      {run.finding && <Pill tone={run.finding.level === "critical" ? "bad" : "warn"}>{run.finding.rule.replaceAll("_", " ")}</Pill>}
    </a>
  );
}
