// Data sets: versions, what each was made of, what used it.
import type { DataSet, DataSets } from "../contract/work.ts";
import { ago, brief, bytes, count, plural } from "../format.ts";
import { useAnswer } from "../live.ts";
import { Answered } from "../parts/answers.tsx";
import { Card, Figures, Nothing, Pill } from "../parts/parts.tsx";
import { RunLine } from "../parts/runs.tsx";
import { Paragraph, Text } from "../parts/text.tsx";
import { link } from "../router.ts";

export function DataSetsScreen() {
  const asked = useAnswer<DataSets>({ what: "datasets" }, (change) => Boolean(change.list || change.diary), 5000);
  return (
    <>
      <header>
        <h1>Data sets</h1>
      </header>
      <Answered of={asked}>
        {(answer) => (
          <>
            {answer.jobs.map((job) => (
              <Card key={job.id}>
                <p class="row">
                  <span class="dot live" /> <Text>{job.doing.foreign}</Text> <code class="quiet">{job.id}</code>
                  {job.read != null && <span class="quiet">{count(job.read)} read</span>}
                  {job.kept != null && <span class="quiet">{count(job.kept)} kept</span>}
                </p>
              </Card>
            ))}
            {answer.datasets.length === 0 && <Nothing>No data set yet. 'toprope data' makes them of rollouts, files and recorded traces.</Nothing>}
            {answer.datasets.map((set) => (
              <Card key={set.name} title={set.name} note={set.inbox ? "accepts traces" : undefined}>
                {set.versions.length === 0 && <Nothing>No version yet.</Nothing>}
                <ul class="list">
                  {set.versions.map((one) => (
                    <li key={one.version}>
                      <a class="runline" href={link(["dataset", `${set.name}@v${String(one.version).replace(/^v/, "")}`])}>
                        <span class="strong">v{String(one.version).replace(/^v/, "")}</span>
                        <span class="cut quiet">
                          <Text>{one.description.foreign}</Text>
                        </span>
                        <span class="push small">{plural(one.items, "item")}</span>
                        <span class="quiet small">{bytes(one.bytes)}</span>
                        <span class="quiet small">{plural(one.sources, "source")}</span>
                        <span class="quiet small">{ago(one.made_at, answer.at)}</span>
                      </a>
                    </li>
                  ))}
                </ul>
              </Card>
            ))}
          </>
        )}
      </Answered>
    </>
  );
}

export function DataSetScreen({ name }: { name: string }) {
  const asked = useAnswer<DataSet>({ what: "dataset", name });
  return <Answered of={asked}>{(set) => <Shown set={set} name={name} />}</Answered>;
}

const WORDS = { run: "run", dataset: "data set", inbox: "inbox", file: "file", step: "step" } as const;

function Shown({ set, name }: { set: DataSet; name: string }) {
  return (
    <>
      <header>
        <div>
          <h1>
            {set.name} <span class="detail">v{String(set.dataset_version).replace(/^v/, "")}</span>
          </h1>
          <Paragraph class="quiet">{set.description.foreign}</Paragraph>
          <p class="quiet small">
            <code>{set.digest}</code> · made {ago(set.made_at, set.at)}
          </p>
        </div>
      </header>
      <Card>
        <Figures
          of={[
            ["items", count(set.items)],
            ["size", bytes(set.bytes)],
            ...Object.entries(set.counts)
              .filter((one): one is [string, number] => typeof one[1] === "number")
              .slice(0, 8)
              .map(([label, value]) => [label.replaceAll("_", " "), count(value)] as const),
          ]}
        />
      </Card>
      <div class="pair">
        <Card title="Made of" note={set.strategy && <Text>{set.strategy.foreign}</Text>}>
          {set.made_of.length === 0 && <Nothing>No source is recorded.</Nothing>}
          <ol class="list flow">
            {set.made_of.map((one) => (
              <li class="row">
                <Pill tone={one.kind === "step" ? "" : "blue"}>{WORDS[one.kind] ?? one.kind}</Pill>
                <span class="cut">
                  {one.kind === "run" || one.kind === "dataset" ? (
                    <a href={link([one.kind, one.name.foreign])}>
                      <Text>{one.name.foreign}</Text>
                    </a>
                  ) : (
                    <Text>{one.name.foreign}</Text>
                  )}
                </span>
                {one.count != null && <span class="push quiet small">{count(one.count)}</span>}
              </li>
            ))}
          </ol>
        </Card>
        <Card title="Used by" note={plural(set.used_by.length, "run")}>
          {set.used_by.length === 0 && <Nothing>No run has trained on it.</Nothing>}
          <ul class="list">
            {set.used_by.map((run) => (
              <li key={run.run_id}>
                <RunLine run={run} now={set.at} />
              </li>
            ))}
          </ul>
          {set.other_versions.length > 0 && (
            <p class="row small">
              <span class="quiet">Other versions:</span>
              {set.other_versions.map((one) => (
                <a href={link(["dataset", one.includes("@") ? one : `${name.split("@")[0]}@${one}`])}>{one}</a>
              ))}
            </p>
          )}
        </Card>
      </div>
      <Card title="Files">
        <div class="wide-table" tabIndex={0} role="region" aria-label="Files">
          <table>
            <thead>
              <tr>
                <th scope="col">file</th>
                <th scope="col" class="figure">items</th>
                <th scope="col" class="figure">size</th>
                <th scope="col">sha256</th>
              </tr>
            </thead>
            <tbody>
              {set.files.map((file) => (
                <tr>
                  <th scope="row">
                    <code>{file.name}</code>
                  </th>
                  <td class="figure">{count(file.items)}</td>
                  <td class="figure">{bytes(file.bytes)}</td>
                  <td>
                    <code title={file.sha256}>{file.sha256.slice(0, 16)}</code>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </Card>
      {Object.values(set.counts).some((value) => value !== null && typeof value === "object") && (
        <Card title="Counts">
          <dl class="pairs small">
            {Object.entries(set.counts).map(([label, value]) =>
              value !== null && typeof value === "object" ? (
                <>
                  <dt>{label.replaceAll("_", " ")}</dt>
                  <dd>
                    <Text>
                      {Object.entries(value)
                        .map(([one, n]) => `${one.replaceAll("_", " ")} ${brief(n)}`)
                        .join(", ") || "none"}
                    </Text>
                  </dd>
                </>
              ) : null,
            )}
          </dl>
        </Card>
      )}
      {set.recipe && (
        <Card title="Recipe">
          <pre class="excerpt" tabIndex={0}>
            <Text>{set.recipe.foreign}</Text>
          </pre>
        </Card>
      )}
      <Card title="Card">
        <pre class="excerpt" tabIndex={0}>
          <Text>{set.card.foreign}</Text>
        </pre>
      </Card>
    </>
  );
}
