// Sweeps: candidates by epoch, who descends from whom, the best.
import type { Candidate, Sweep, Sweeps } from "../contract/work.ts";
import { Interval, Spark } from "../charts/spark.tsx";
import { brief, count, number, percent, plural } from "../format.ts";
import { useAnswer } from "../live.ts";
import { Answered, Outcome, useAction } from "../parts/answers.tsx";
import { Card, Figures, Nothing, Pill, TwoClicks } from "../parts/parts.tsx";
import { Progress, RunLine, StateOf } from "../parts/runs.tsx";
import { Paragraph, plain, Text } from "../parts/text.tsx";
import { link, useRoute } from "../router.ts";
import { theSource } from "../live.ts";

export function SweepsScreen() {
  const asked = useAnswer<Sweeps>({ what: "sweeps" }, (change) => Boolean(change.list || change.runs), 5000);
  return (
    <>
      <header>
        <h1>Sweeps</h1>
      </header>
      <Answered of={asked}>
        {(answer) =>
          answer.sweeps.length === 0 ? (
            <Nothing>No sweep yet. The agent starts one with start_sweep.</Nothing>
          ) : (
            <Card>
              <ul class="list">
                {answer.sweeps.map((sweep) => (
                  <li key={sweep.run.run_id}>
                    <RunLine run={sweep.run} now={answer.at} />
                    <p class="quiet small indent">
                      {sweep.strategy} over <Text>{sweep.fields.join(", ")}</Text> · {count(sweep.epochs_completed)} of {plural(sweep.epochs, "epoch")} ·{" "}
                      {count(sweep.measured)} of {count(sweep.planned)} candidates measured
                      {sweep.best && ` · best ${sweep.best.id}${sweep.best.score == null ? "" : ` with ${number(sweep.best.score)}`}`}
                    </p>
                  </li>
                ))}
              </ul>
            </Card>
          )
        }
      </Answered>
    </>
  );
}

export function SweepScreen({ runId }: { runId: string }) {
  const asked = useAnswer<Sweep>({ what: "sweep", run_id: runId }, (change) => Boolean(change.runs?.[runId] || change.list || change.runs), 4000);
  return <Answered of={asked}>{(sweep) => <Shown sweep={sweep} />}</Answered>;
}

function Shown({ sweep }: { sweep: Sweep }) {
  const action = useAction();
  const source = theSource();
  const { run } = sweep;
  const best = sweep.candidates.find((one) => one.id === sweep.best);
  return (
    <>
      <header>
        <div>
          <h1>
            <Text>{run.title}</Text> <span class="detail"><Text>{run.detail}</Text></span> <StateOf run={run} />
          </h1>
          <p class="quiet">
            <code>{run.run_id}</code> · {sweep.strategy}
          </p>
        </div>
        {run.live && !source.readOnly && (
          <TwoClicks again="Click again to stop the sweep" disabled={action.busy} onConfirmed={() => void action.act({ do: "stop", run_id: run.run_id })}>
            Stop
          </TwoClicks>
        )}
      </header>
      <Outcome of={action} />
      <Card class="verdict">
        <div class="words">
          <p class="big">
            <span class="accent">{best?.score != null ? (best.score === best.accuracy ? percent : number)(best.score) : "no candidate measured"}</span>
          </p>
          <p class="quiet small">
            {best ? `${best.score != null ? "validation score, biased upwards: " : ""}${best.id}, ${valuesOf(best)}` : "Candidates are measured on validation tasks."}
          </p>
          {sweep.rivals && <p class="quiet small">{sweep.rivals}</p>}
          {run.live && <Progress run={run} />}
        </div>
        {sweep.heldout?.accuracy && (
          <div>
            <p class="quiet small">held-out, 95 % interval</p>
            <Interval after={sweep.heldout.accuracy} axis />
          </div>
        )}
        <Figures
          of={[
            ["epochs", `${count(sweep.epochs_completed)} of ${count(sweep.epochs)}`],
            ["candidates", count(sweep.candidates.length)],
            ["steps", <>{count(sweep.steps)}{sweep.most_steps ? <span class="quiet small"> of {count(sweep.most_steps)}</span> : null}</>],
            ["held-out of the best", sweep.heldout?.accuracy ? percent(sweep.heldout.accuracy.value) : <span class="quiet small">{plain(sweep.heldout?.why?.foreign ?? "not measured")}</span>],
          ]}
        />
      </Card>
      <div class="columns">
        <div>
          <Candidates sweep={sweep} />
        </div>
        <div>
          <Card title="Space">
            <dl class="pairs small">
              {sweep.space.map((one) => (
                <>
                  <dt>
                    <code>{one.field}</code>
                  </dt>
                  <dd>
                    <Text>{one.says}</Text>
                  </dd>
                </>
              ))}
            </dl>
          </Card>
        </div>
      </div>
      {sweep.candidates.some((one) => one.parent || one.continues) && <Lineage sweep={sweep} />}
    </>
  );
}

const written = (value: Candidate["values"][string]) => (value !== null && typeof value === "object" ? value.foreign : brief(value));
const short = (field: string) => field.split(".").at(-1)!.replaceAll("_", " ");

function valuesOf(candidate: Candidate): string {
  return Object.entries(candidate.values)
    .map(([field, value]) => `${short(field)} ${plain(written(value))}`)
    .join(", ");
}

function Candidates({ sweep }: { sweep: Sweep }) {
  const { at, path } = useRoute();
  const fields = [...new Set(sweep.candidates.flatMap((one) => Object.keys(one.values)))];
  const byEpoch = at.by === "epoch";
  const rows = byEpoch ? [...sweep.candidates].sort((a, b) => a.epoch - b.epoch) : sweep.candidates;
  return (
    <Card
      title="Candidates"
      note={<a href={link(path, { ...at, by: byEpoch ? null : "epoch" })}>{byEpoch ? "best first" : "by epoch"}</a>}
    >
      <div class="wide-table" tabIndex={0} role="region" aria-label="Candidates">
        <table>
          <thead>
            <tr>
              <th scope="col">candidate</th>
              <th scope="col" class="figure">epoch</th>
              {fields.map((field) => (
                <th scope="col" class="figure" title={field}>{short(field)}</th>
              ))}
              <th scope="col" class="figure">steps</th>
              <th scope="col" class="figure">score</th>
              <th scope="col">course</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((one) => (
              <tr key={one.id} class={one.id === sweep.best ? "best-row" : ""}>
                <th scope="row">
                  {one.run_id ? <a href={link(["run", one.run_id])}>{one.id}</a> : one.id} {one.id === sweep.best && <Pill tone="good">best</Pill>}
                  {one.survived && one.id !== sweep.best && <Pill>survived</Pill>}
                  {(one.state === "failed" || one.state === "lost") && <Pill tone="bad">{one.state}</Pill>}
                  {one.why && <Paragraph class="quiet small">{one.why.foreign}</Paragraph>}
                </th>
                <td class="figure">{one.epoch}</td>
                {fields.map((field) => (
                  <td class="figure mono">
                    <Text>{field in one.values ? written(one.values[field]!) : "–"}</Text>
                  </td>
                ))}
                <td class="figure">{count(one.line_steps)}</td>
                <td class="figure strong">{one.score == null ? "–" : number(one.score)}</td>
                <td>{one.spark && <Spark values={one.spark} />}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

/** Who descends from whom: epochs from left to right, a line from each candidate to its parent. The table says the same. */
function Lineage({ sweep }: { sweep: Sweep }) {
  const epochs = [...new Set(sweep.candidates.map((one) => one.epoch))].sort((a, b) => a - b);
  const columns = epochs.map((epoch) => sweep.candidates.filter((one) => one.epoch === epoch));
  const most = Math.max(...columns.map((column) => column.length));
  const height = most * 30 + 24;
  const width = Math.max(epochs.length * 150, 300);
  const place = new Map(columns.flatMap((column, x) => column.map((one, y) => [one.id, [x * 150 + 16, y * 30 + 34]] as const)));
  return (
    <Card title="Lineage" note="epochs from left to right; filled: survived">
      <div class="wide-table" tabIndex={0} role="region" aria-label="Lineage of the candidates">
        <svg class="lineage" width={width} height={height} role="img" aria-label="Each candidate with a line to its parent; the table of candidates names the same.">
          {epochs.map((epoch, x) => (
            <text class="quiet" x={x * 150 + 10} y="14">
              epoch {epoch}
            </text>
          ))}
          {sweep.candidates.map((one) => {
            const [to, from] = [place.get(one.id)!, place.get(one.parent ?? one.continues ?? "")];
            return from && <path d={`M${from[0]} ${from[1]}C${from[0]! + 70} ${from[1]} ${to[0]! - 70} ${to[1]} ${to[0]} ${to[1]}`} />;
          })}
          {sweep.candidates.map((one) => {
            const [x, y] = place.get(one.id)!;
            return (
              <g class={`${one.survived ? "survived" : ""} ${one.id === sweep.best ? "best" : ""}`}>
                <circle cx={x} cy={y} r="5" />
                <text x={x! + 11} y={y! + 4}>
                  {one.id} {one.score == null ? "" : number(one.score)}
                </text>
              </g>
            );
          })}
        </svg>
      </div>
      <details class="table">
        <summary>
          Table<span class="unheard"> of the lineage</span>
        </summary>
        <table>
          <thead>
            <tr>
              <th scope="col">candidate</th>
              <th scope="col">epoch</th>
              <th scope="col">parent</th>
              <th scope="col">continues</th>
            </tr>
          </thead>
          <tbody>
            {sweep.candidates.map((one) => (
              <tr>
                <th scope="row">{one.id}</th>
                <td>{one.epoch}</td>
                <td>{one.parent ?? "–"}</td>
                <td>{one.continues ?? "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </Card>
  );
}
