// The navigation: screens, and the runs with their curves.
import { useState } from "preact/hooks";
import { Spark } from "./charts/spark.tsx";
import type { Change, RunItem, Runs } from "./contract/common.ts";
import { duration, percent } from "./format.ts";
import { theSource, useAnswer, useLost } from "./live.ts";
import { Icon } from "./parts/parts.tsx";
import { dotOf, runLink } from "./parts/runs.tsx";
import { plain, Text } from "./parts/text.tsx";
import { choose, link, type Route } from "./router.ts";
import { useNow } from "./screens/now.tsx";
import { nextTheme, useTheme } from "./theme.ts";

export const SCREENS: readonly (readonly [string, string, string])[] = [
  ["now", "Now", "n"],
  ["compare", "Compare", "c"],
  ["sweeps", "Sweeps", "s"],
  ["datasets", "Data sets", "d"],
  ["ledger", "Ledger", "l"],
  ["environments", "Environments", "e"],
  ["rope", "Rope", "r"],
];

/** Screens of one object belong to the list that it stands in. */
const LISTS: Record<string, string> = { sweep: "sweeps", dataset: "datasets", environment: "environments" };

const listChanged = (change: Change) => Boolean(change.list || Object.values(change.runs ?? {}).some((what) => what.includes("status")));

export function useRuns(route: Route) {
  return useAnswer<Runs>({ what: "runs", state: "any", query: route.at.find || undefined, cursor: route.at.runs }, listChanged, 4000);
}

export function Side({ route, onHelp }: { route: Route; onHelp: () => void }) {
  const source = theSource();
  const { answer: now } = useNow();
  const theme = useTheme();
  const [screen] = route.path;
  const waits = now?.waiting.filter((ask) => !ask.approved).length ?? 0;
  return (
    <div class="side">
      <a class="brand" href={link("now")}>
        <Icon name="rope" /> Toprope
      </a>
      <nav aria-label="Screens">
        {SCREENS.filter(([name]) => source.screens.includes(name)).map(([name, words]) => (
          <a key={name} href={link(name)} aria-current={screen === name || LISTS[screen ?? ""] === name ? "page" : undefined}>
            {words}
            {name === "now" && waits > 0 && (
              <span class="badge">
                {waits}
                <span class="unheard"> waiting for you</span>
              </span>
            )}
          </a>
        ))}
      </nav>
      <RunList route={route} />
      <div class="foot">
        {source.place === "browser" && (
          <button type="button" class="bare" onClick={nextTheme} title="Light, dark, or as the system has it">
            Theme: {theme}
          </button>
        )}
        <button type="button" class="bare" onClick={onHelp} aria-keyshortcuts="?">
          Keys
        </button>
        {source.readOnly && <span class="quiet small push">read-only</span>}
      </div>
    </div>
  );
}

function RunList({ route }: { route: Route }) {
  const [open, setOpen] = useState(false);
  const { answer } = useRuns(route);
  const live = answer?.runs.filter((run) => run.live) ?? [];
  const ended = answer?.runs.filter((run) => !run.live) ?? [];
  return (
    <div class="runs">
      <button type="button" class="fold" aria-expanded={open} onClick={() => setOpen(!open)}>
        Runs {answer ? `(${answer.total})` : ""}
      </button>
      <div class={`folded ${open ? "open" : ""}`}>
        <div class="find">
          <input
            id="find"
            type="search"
            placeholder="Find a run"
            aria-label="Find a run"
            value={route.at.find ?? ""}
            onInput={(event) => choose({ find: event.currentTarget.value, runs: null })}
          />
        </div>
        {live.length > 0 && <Listed title="Live" runs={live} route={route} at={answer!.at} />}
        {ended.length > 0 && <Listed title="Ended" runs={ended} route={route} at={answer!.at} />}
        {answer?.runs.length === 0 && <p class="quiet small none">{route.at.find ? "No run matches." : "No run yet."}</p>}
        <p class="row small pages">
          {route.at.runs && <a class="page" href={link(route.path, { ...route.at, runs: null })}>Newest</a>}
          {answer?.next_cursor && <a class="page" href={link(route.path, { ...route.at, runs: answer.next_cursor })}>Older</a>}
        </p>
      </div>
    </div>
  );
}

function Listed({ title, runs, route, at }: { title: string; runs: RunItem[]; route: Route; at: number }) {
  return (
    <section aria-label={`${title} runs`}>
      <h2>{title}</h2>
      {runs.map((run) => (
        <a
          key={run.run_id}
          href={runLink(run, route.at)}
          aria-current={route.path[1] === run.run_id ? "page" : undefined}
          title={plain(run.run_id)}
        >
          <span class={`dot ${dotOf(run)}`} />
          <span class="name cut">
            <Text>{run.title}</Text>
          </span>
          <span class="value">{run.accuracy ? percent(run.accuracy.value, 0) : run.live && run.progress.success != null ? percent(run.progress.success, 0) : ""}</span>
          <span class="about">
            {run.detail && (
              <span class="cut">
                <Text>{run.detail}</Text>
              </span>
            )}
            <span>{run.live ? run.state : duration(at - (run.ended_at ?? run.created_at))}</span>
          </span>
          {run.spark && <Spark values={run.spark} bad={run.state === "failed" || run.finding?.level === "critical"} />}
        </a>
      ))}
    </section>
  );
}

export function Away() {
  const words = useLost();
  return words ? (
    <p class="told bad" role="status">
      {words}
    </p>
  ) : null;
}
