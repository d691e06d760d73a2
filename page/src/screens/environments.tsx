// Environments: what there is to train on, and what the checks of this machine found.
import type { Environment, EnvironmentItem, Environments } from "../contract/work.ts";
import { Interval } from "../charts/spark.tsx";
import { ago, count, percent, plural } from "../format.ts";
import { useAnswer } from "../live.ts";
import { Answered } from "../parts/answers.tsx";
import { Card, Figures, Nothing, Pill, type Tone } from "../parts/parts.tsx";
import { RunLine } from "../parts/runs.tsx";
import { Paragraph, Text } from "../parts/text.tsx";
import { choose, link, useRoute } from "../router.ts";

export function EnvironmentsScreen() {
  const { at } = useRoute();
  const asked = useAnswer<Environments>({ what: "environments", query: at.query, cursor: at.page }, (change) => Boolean(change.list), 10_000);
  return (
    <>
      <header>
        <h1>Environments</h1>
        <input class="search" type="search" aria-label="Search environments" placeholder="Search" value={at.query ?? ""} onInput={(event) => choose({ query: event.currentTarget.value, page: null })} />
      </header>
      <Answered of={asked}>
        {(answer) => (
          <Card note={plural(answer.total, "environment")}>
            {answer.environments.length === 0 && <Nothing>None matches.</Nothing>}
            <ul class="list">
              {answer.environments.map((one) => (
                <li key={one.name}>
                  <Line of={one} />
                </li>
              ))}
            </ul>
            <p class="row small">
              {at.page && <a class="page" href={link("environments", { query: at.query })}>First page</a>}
              {answer.next_cursor && <a class="page" href={link("environments", { query: at.query, page: answer.next_cursor })}>Next page</a>}
            </p>
          </Card>
        )}
      </Answered>
    </>
  );
}

function Line({ of }: { of: EnvironmentItem }) {
  return (
    <>
      <a class="runline" href={link(["environment", of.name])}>
        <span class={`dot ${of.usable ? "" : "bad"}`} />
        <span class="strong">{of.name}</span>
        <span class="quiet small">{of.origin}</span>
        <span class="push quiet small">{of.runs > 0 && plural(of.runs, "run")}</span>
        <span class="strong">{of.best && percent(of.best.value)}</span>
      </a>
      <Paragraph class="quiet small indent">{of.usable ? of.summary.foreign : (of.why_not?.foreign ?? of.summary.foreign)}</Paragraph>
    </>
  );
}

const TONES: Record<string, Tone> = { ok: "good", note: "", warning: "warn", critical: "bad" };

export function EnvironmentScreen({ name }: { name: string }) {
  const asked = useAnswer<Environment>({ what: "environment", name }, (change) => Boolean(change.list), 5000);
  return (
    <Answered of={asked}>
      {(of) => (
        <>
          <header>
            <div>
              <h1>
                {of.name} <span class="detail">{of.origin}</span>
              </h1>
              <Paragraph>{of.summary.foreign}</Paragraph>
              <p class="row">
                {of.tags.map((tag) => (
                  <Pill>{tag}</Pill>
                ))}
              </p>
            </div>
          </header>
          {!of.usable && (
            <Card class="alert" title="Cannot be used here">
              <Paragraph>{of.why_not?.foreign}</Paragraph>
            </Card>
          )}
          <div class="pair">
            <Card title="Checks" note={of.checked_at ? `made ${ago(of.checked_at, of.at)}` : undefined}>
              {of.checks ? (
                <p>
                  <Pill tone={TONES[of.verdict ?? "note"] ?? ""}>{of.verdict ?? "not judged"}</Pill>{" "}
                  {of.checks.length === 0 && <span class="quiet">Nothing found.</span>}
                </p>
              ) : (
                <Nothing>No check was made on this machine. 'toprope env check {of.name}' makes one.</Nothing>
              )}
              <ul class="list">
                {(of.checks ?? []).map((check) => (
                  <li class="row top" key={check.name}>
                    <Pill tone={TONES[check.state] ?? ""}>{check.state}</Pill>
                    <p class="grow">
                      <span class="strong">{check.name.replaceAll("_", " ")}</span>{" "}
                      <span class="quiet">
                        <Text>{check.what.foreign}</Text>
                      </span>
                    </p>
                  </li>
                ))}
              </ul>
            </Card>
            <Card title="Facts">
              <Figures
                of={[
                  ["ecosystem", of.ecosystem],
                  of.turns != null && (["turns at most", count(of.turns)] as const),
                  ["runs", count(of.runs)],
                ]}
              />
            </Card>
          </div>
          <Card title="Runs here" note={of.best && `best ${percent(of.best.value)}`}>
            {of.best && <Interval after={of.best} />}
            {of.runs_here.length === 0 && <Nothing>None yet.</Nothing>}
            <ul class="list">
              {of.runs_here.map((run) => (
                <li key={run.run_id}>
                  <RunLine run={run} now={of.at} />
                </li>
              ))}
            </ul>
          </Card>
        </>
      )}
    </Answered>
  );
}
