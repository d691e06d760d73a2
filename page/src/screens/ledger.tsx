// The ledger: goals, experiments with their decisions, and the handoff to the next agent.
import { useState } from "preact/hooks";
import type { Experiment, Ledger } from "../contract/work.ts";
import { ago, percent } from "../format.ts";
import { theSource, useAnswer } from "../live.ts";
import { Answered, Outcome, useAction } from "../parts/answers.tsx";
import { Card, Nothing, Pill, type Tone } from "../parts/parts.tsx";
import { RunLine } from "../parts/runs.tsx";
import { Paragraph, Text } from "../parts/text.tsx";
import { link, useRoute } from "../router.ts";
import { useNow } from "./now.tsx";

const TONES: Record<Experiment["decision"], Tone> = { keep: "good", discard: "bad", repeat: "warn", undecided: "" };

export function LedgerScreen() {
  const asked = useAnswer<Ledger>({ what: "ledger" }, (change) => Boolean(change.ledger || change.list), 3000);
  const { answer: now } = useNow();
  const { at } = useRoute();
  return (
    <>
      <header>
        <h1>Ledger</h1>
        {now?.may_act && (
          <a class="button" href={link("ledger", { note: at.note === "new" ? null : "new" })}>
            {at.note === "new" ? "Close" : "Add a note"}
          </a>
        )}
      </header>
      {now?.may_act && at.note === "new" && <Note />}
      <Answered of={asked}>
        {(ledger) => (
          <div class="columns">
            <div>
              <Card title="Experiments">
                {ledger.experiments.length === 0 && <Nothing>No experiment is noted yet. The agent notes them with note_experiment.</Nothing>}
                <ol class="list">
                  {ledger.experiments.map((one) => (
                    <li key={one.id}>
                      <OneExperiment of={one} at={ledger.at} mayAct={Boolean(now?.may_act)} />
                    </li>
                  ))}
                </ol>
              </Card>
              <Card title="Handoff" note="what another agent would read first">
                <pre class="excerpt tall" tabIndex={0}>
                  <Text>{ledger.handoff.foreign}</Text>
                </pre>
              </Card>
            </div>
            <div>
              <Card title="Goals">
                {ledger.goals.length === 0 && <Nothing>No goal is noted.</Nothing>}
                <ul class="list">
                  {ledger.goals.map((one) => (
                    <li>
                      <p class="quiet small">{one.environment}</p>
                      <Paragraph>{one.goal.foreign}</Paragraph>
                    </li>
                  ))}
                </ul>
              </Card>
            </div>
          </div>
        )}
      </Answered>
    </>
  );
}

function OneExperiment({ of, at, mayAct }: { of: Experiment; at: number; mayAct: boolean }) {
  const route = useRoute();
  const open = route.at.experiment === of.id;
  return (
    <article id={of.id}>
      <p class="row">
        <Pill tone={TONES[of.decision]}>{of.decision}</Pill>
        <span class="quiet small">{of.environment}</span>
        <span class="quiet small push">{ago(of.updated_at, at)}</span>
        <span class="strong">{of.accuracy == null ? "" : percent(of.accuracy)}</span>
      </p>
      <p class="strong">
        <a href={link("ledger", { experiment: open ? null : of.id })}>
          <Text>{of.hypothesis.foreign || of.id}</Text>
        </a>
      </p>
      {of.outcome.foreign && <Paragraph>{of.outcome.foreign}</Paragraph>}
      {of.question && (
        <p class="quiet">
          Open: <Text>{of.question.foreign}</Text>
        </p>
      )}
      {open && (
        <>
          {of.runs.map((run) => (
            <RunLine run={run} now={at} />
          ))}
          {of.gone_runs.length > 0 && <p class="quiet small">Deleted: {of.gone_runs.join(", ")}</p>}
          {of.drafts.length > 0 && <p class="quiet small">Drafts: {of.drafts.join(", ")}</p>}
          {mayAct && theSource().place === "browser" && <Note about={of} />}
        </>
      )}
    </article>
  );
}

const DECISIONS = ["undecided", "keep", "discard", "repeat"] as const;

/** A note of the owner: a new experiment, or more about one. */
function Note({ about }: { about?: Experiment }) {
  const action = useAction();
  const [note, set] = useState<Record<string, string>>({});
  const field = (name: string, label: string, rows = 2) => (
    <label>
      <span class="quiet small">{label}</span>
      <textarea rows={rows} value={note[name] ?? ""} onInput={(event) => set({ ...note, [name]: event.currentTarget.value })} />
    </label>
  );
  const send = async () => {
    const given = Object.fromEntries(Object.entries(note).filter(([, text]) => text.trim()));
    const runs = (given.run_ids ?? "").split(/[\s,]+/).filter(Boolean);
    delete given.run_ids;
    const done = await action.act({ do: "note", note: { ...given, ...(runs.length && { run_ids: runs }), ...(about && { experiment_id: about.id }) } });
    if (done) set({});
  };
  const form = (
    <form
      class="note"
      onSubmit={(event) => {
        event.preventDefault();
        void send();
      }}
    >
      {!about && field("hypothesis", "Hypothesis")}
      {field("outcome", "Outcome")}
      {field("question", "Open question", 1)}
      {!about && (
        <label>
          <span class="quiet small">Runs, by id</span>
          <input value={note.run_ids ?? ""} onInput={(event) => set({ ...note, run_ids: event.currentTarget.value })} />
        </label>
      )}
      <div class="row">
        <label class="row">
          <span class="quiet small">Decision</span>
          <select value={note.decision ?? ""} onChange={(event) => set({ ...note, decision: event.currentTarget.value })}>
            <option value="">unchanged</option>
            {DECISIONS.map((one) => (
              <option>{one}</option>
            ))}
          </select>
        </label>
        <button type="submit" class="first" disabled={action.busy || !Object.values(note).some((text) => text.trim())}>
          Note it
        </button>
      </div>
      <Outcome of={action} />
    </form>
  );
  return about ? form : <Card title="Note">{form}</Card>;
}
