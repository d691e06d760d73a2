// The course of a run: what was found in it, who worked on it, what happened when.
import type { Account, Event, Finding, RunLive } from "../../contract/run.ts";
import type { Log } from "../../contract/run.ts";
import { brief, clock, count, duration, number, plural, rough } from "../../format.ts";
import { theSource, useAnswer } from "../../live.ts";
import { Answered } from "../../parts/answers.tsx";
import { Card, Nothing, Pill, type Tone } from "../../parts/parts.tsx";
import { Paragraph, Text } from "../../parts/text.tsx";
import { link, useRoute } from "../../router.ts";

const TONES: Record<Finding["level"], Tone> = { note: "", warning: "warn", critical: "bad" };

export function Findings({ live }: { live: RunLive }) {
  const { findings } = live;
  const open = findings.filter((finding) => finding.open).length;
  if (!findings.length && !live.facts.steps) return null;
  return (
    <Card title="Findings" note={findings.length > 0 && `${open} open of ${findings.length}`}>
      {findings.length === 0 && (
        <p>
          <Pill tone="good">✓</Pill> <span class="quiet">Nothing found in {plural(live.facts.steps, "step")}.</span>
        </p>
      )}
      <ul class="list">
        {findings.map((finding) => (
          <li key={`${finding.rule} ${finding.from_step}`}>
            <OneFinding finding={finding} />
          </li>
        ))}
      </ul>
    </Card>
  );
}

function OneFinding({ finding }: { finding: Finding }) {
  const { at, path } = useRoute();
  const steps =
    finding.from_step != null &&
    `step ${count(finding.from_step)}${finding.to_step == null ? " on" : finding.to_step > finding.from_step ? ` to ${count(finding.to_step)}` : ""}`;
  const seen = Object.entries(finding.observed);
  return (
    <details class="finding" open={finding.open && finding.level !== "note"}>
      <summary>
        <Pill tone={finding.open ? TONES[finding.level] : ""}>{finding.rule.replaceAll("_", " ")}</Pill>{" "}
        <span class="quiet small">
          {finding.open ? finding.level : "over"}
          {steps && ` · ${steps}`}
        </span>
      </summary>
      <Paragraph>{finding.what}</Paragraph>
      <dl class="pairs small">
        {seen.length > 0 && (
          <>
            <dt>seen</dt>
            <dd>
              {seen.map(([name, value], i) => (
                <>
                  {i > 0 && ", "}
                  {name.replaceAll("_", " ")} <Text>{typeof value === "object" && value ? value.foreign : brief(value)}</Text>
                </>
              ))}
            </dd>
          </>
        )}
        {finding.threshold && (
          <>
            <dt>limit</dt>
            <dd>
              <Text>{finding.threshold}</Text>
            </dd>
          </>
        )}
        {finding.source && (
          <>
            <dt>source</dt>
            <dd>
              <Text>{finding.source}</Text> <span class="quiet">({finding.confidence} confidence)</span>
            </dd>
          </>
        )}
        {finding.next && (
          <>
            <dt>next</dt>
            <dd class="strong">
              <Text>{finding.next}</Text>
            </dd>
          </>
        )}
        {finding.follows && (
          <>
            <dt>follows</dt>
            <dd>{finding.follows.replaceAll("_", " ")}</dd>
          </>
        )}
      </dl>
      {finding.from_step != null && finding.to_step != null && finding.to_step > finding.from_step && (
        <p>
          <a class="quiet small page" href={link(path, { ...at, from: String(finding.from_step), to: String(finding.to_step) })}>
            Show these steps
          </a>
        </p>
      )}
    </details>
  );
}

export function FailureCard({ failure, runId }: { failure: NonNullable<RunLive["failure"]>; runId: string }) {
  return (
    <Card class="alert" title={`${failure.component} failed${failure.kind ? `: ${failure.kind.replaceAll("_", " ")}` : ""}`}>
      <Paragraph>{failure.reason.foreign}</Paragraph>
      {failure.hint && <Paragraph class="strong">{failure.hint}</Paragraph>}
      {failure.excerpt.length > 0 && (
        <pre class="excerpt" tabIndex={0}>
          <Text>{failure.excerpt.map((line) => line.foreign).join("\n")}</Text>
        </pre>
      )}
      {theSource().place === "browser" && (
        <p>
          <a href={link(["run", runId], { log: failure.component })}>Log of {failure.component}</a>
        </p>
      )}
    </Card>
  );
}

const DOTS: Record<string, string> = { ready: "live", starting: "wait", exited: "bad" };

export function CrewCard({ live, runId, now }: { live: RunLive; runId: string; now: number }) {
  const { at, path } = useRoute();
  const browser = theSource().place === "browser";
  return (
    <Card title="Crew" note={`attempt ${live.state.attempt}`}>
      <ul class="list crew">
        {live.crew.map((member) => (
          <li key={member.name} class="row">
            <span class={`dot ${DOTS[member.state] ?? ""}`} />
            {browser ? <a href={link(path, { ...at, log: at.log === member.name ? null : member.name })}>{member.name}</a> : <span>{member.name}</span>}
            <span class="quiet small">
              {member.state}
              {member.exit_code ? ` (${member.exit_code})` : ""}
              {live.run.live && ` for ${duration(now - member.since)}`}
            </span>
            <span class={`push small ${member.restarts ? "warn" : "quiet"}`}>
              {member.restarts ? plural(member.restarts, "restart") : "no restart"}
              {member.worker_restarts > 0 && `, worker ${plural(member.worker_restarts, "restart")}`}
            </span>
          </li>
        ))}
      </ul>
      {live.account && <Balance of={live.account} />}
      {browser && at.log && live.crew.some((member) => member.name === at.log) && <LogOf runId={runId} component={at.log} live={live.run.live} />}
    </Card>
  );
}

/** The account of groups: what was begun and where it went. */
function Balance({ of }: { of: Account }) {
  const reasons = (counts: Record<string, number>) => Object.entries(counts).map(([name, n]) => `${rough(n)} ${name.replaceAll("_", " ")}`);
  const open = Object.values(of.given_up).reduce((rest, n) => rest - n, of.begun! - of.posted! - of.unanswered!);
  const begun = [
    of.posted != null && `${rough(of.posted)} posted`,
    of.unanswered ? `${rough(of.unanswered)} unanswered` : null,
    ...reasons(of.given_up).map((one) => `${one} (given up)`),
    open > 0 && `${rough(open)} in progress`,
  ].filter(Boolean);
  const accepted = [
    of.committed != null && `${rough(of.committed)} trained`,
    of.waiting != null && `${rough(of.waiting)} waiting`,
    of.delivered != null && `${rough(of.delivered)} out`,
    ...(Object.keys(of.dropped).length ? reasons(of.dropped).map((one) => `${one} (dropped)`) : ["0 dropped"]),
  ].filter(Boolean);
  return (
    <dl class="pairs small account" aria-label="Account of groups">
      {of.begun != null && (
        <>
          <dt>{rough(of.begun)} begun</dt>
          <dd>= {begun.join(" + ")}</dd>
        </>
      )}
      {of.accepted != null && (
        <>
          <dt>{rough(of.accepted)} accepted</dt>
          <dd>= {accepted.join(" + ")}</dd>
        </>
      )}
    </dl>
  );
}

function LogOf({ runId, component, live }: { runId: string; component: string; live: boolean }) {
  const asked = useAnswer<Log>({ what: "log", run_id: runId, component, lines: 200 }, (change) => live && Boolean(change.runs?.[runId]), 5000);
  return (
    <Answered of={asked}>
      {(log) => (
        <pre class="log" tabIndex={0} aria-label={`Log of ${component}`}>
          <Text>{log.lines.map((line) => line.foreign).join("\n") || "The log is empty."}</Text>
        </pre>
      )}
    </Answered>
  );
}

const SHOWN = 14;

export function Events({ events, before }: { events: Event[]; before: number }) {
  const { at, path } = useRoute();
  const all = at.events === "all";
  const newest = [...events].reverse();
  return (
    <Card title="Events">
      {events.length === 0 && <Nothing>None yet.</Nothing>}
      <ol class="events">
        {(all ? newest : newest.slice(0, SHOWN)).map((event) => (
          <li key={event.seq}>
            <time class="mono quiet">{clock(event.at)}</time>
            <span class={toneOf(event)}>
              <Text>{event.text}</Text>
              {event.detail && (
                <span class="quiet">
                  {" "}
                  <Text>{event.detail.foreign}</Text>
                </span>
              )}
            </span>
          </li>
        ))}
      </ol>
      {newest.length > SHOWN && (
        <a class="quiet small page" href={link(path, { ...at, events: all ? null : "all" })}>
          {all ? "Fewer" : `${number(newest.length - SHOWN)} more`}
        </a>
      )}
      {all && before > 0 && <p class="quiet small">{plural(before, "older event")} in the run's folder.</p>}
    </Card>
  );
}

function toneOf(event: Event): string {
  if (event.level === "critical") return "bad";
  if (event.level === "warning") return "warn";
  if (event.kind === "evaluation") return "accent";
  return event.kind === "checkpoint" ? "quiet" : event.text.startsWith("ended") ? "strong" : "";
}
