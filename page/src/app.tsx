// The page: navigation at the side, the screen that the address names, keys.
import { useEffect, useRef, useState } from "preact/hooks";
import { theSource } from "./live.ts";
import { Nothing } from "./parts/parts.tsx";
import { plain } from "./parts/text.tsx";
import { followed, go, link, type Route, useRoute } from "./router.ts";
import { CompareScreen } from "./screens/compare.tsx";
import { DataSetScreen, DataSetsScreen } from "./screens/datasets.tsx";
import { EnvironmentScreen, EnvironmentsScreen } from "./screens/environments.tsx";
import { LedgerScreen } from "./screens/ledger.tsx";
import { NowScreen } from "./screens/now.tsx";
import { RopeScreen } from "./screens/rope.tsx";
import { RunScreen } from "./screens/run/run.tsx";
import { SweepScreen, SweepsScreen } from "./screens/sweeps.tsx";
import { Away, SCREENS, Side, useRuns } from "./side.tsx";
import { runLink } from "./parts/runs.tsx";

export function App() {
  const route = useRoute();
  const help = useRef<HTMLDialogElement>(null);
  const step = useRunSteps(route);
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => onKey(event, route, step, () => help.current?.showModal());
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [route, step]);
  useEffect(() => {
    document.title = `${plain(route.path.slice(0, 2).join(" "))} · Toprope`;
  }, [route.path.join("/")]);
  return (
    <div class={`shell ${theSource().place}`} onClick={followed}>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        To the content
      </a>
      <Side route={route} onHelp={() => help.current?.showModal()} />
      <main class="main" id="main" tabIndex={-1}>
        <Away />
        <Screen route={route} />
      </main>
      <Keys of={help} />
    </div>
  );
}

function Screen({ route }: { route: Route }) {
  const [screen, id = ""] = route.path;
  if (screen === "now") return <NowScreen />;
  if (screen === "run") return <RunScreen key={id} runId={id} />;
  if (screen === "sweep") return <SweepScreen key={id} runId={id} />;
  if (screen === "compare") return <CompareScreen />;
  if (screen === "rope") return <RopeScreen />;
  if (PLACE === "browser") {
    if (screen === "sweeps") return <SweepsScreen />;
    if (screen === "datasets") return <DataSetsScreen />;
    if (screen === "dataset") return <DataSetScreen key={id} name={id} />;
    if (screen === "ledger") return <LedgerScreen />;
    if (screen === "environments") return <EnvironmentsScreen />;
    if (screen === "environment") return <EnvironmentScreen key={id} name={id} />;
  }
  return (
    <Nothing>
      There is no such screen here. <a href={link("now")}>Now</a>
    </Nothing>
  );
}

/** Go to the run before or after the one on the screen, in the order of the list. */
function useRunSteps(route: Route): (by: number) => void {
  const { answer } = useRuns(route);
  const latest = useRef({ answer, route });
  latest.current = { answer, route };
  const [step] = useState(() => (by: number) => {
    const runs = latest.current.answer?.runs ?? [];
    const at = runs.findIndex((run) => run.run_id === latest.current.route.path[1]);
    const next = runs[at < 0 ? 0 : Math.min(Math.max(at + by, 0), runs.length - 1)];
    if (next) go(runLink(next, latest.current.route.at));
  });
  return step;
}

function onKey(event: KeyboardEvent, route: Route, step: (by: number) => void, help: () => void): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (target.matches("input, textarea, select")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const screen = SCREENS.find(([name, , key]) => key === event.key && theSource().screens.includes(name));
  if (screen) go(link(screen[0]));
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "?") help();
  else if (event.key === "/") document.getElementById("find")?.focus();
  else if (event.key === "Escape" && route.at.group) go(link(route.path, { ...route.at, group: null, rollout: null }), true);
  else return;
  event.preventDefault();
}

function Keys({ of }: { of: { current: HTMLDialogElement | null } }) {
  const keys: [string, string][] = [
    ...SCREENS.filter(([name]) => theSource().screens.includes(name)).map(([, words, key]) => [key, words] as [string, string]),
    ["j, k", "next, previous run"],
    ["/", "find a run"],
    ["← →", "read the points of a chart that has the focus"],
    ["Esc", "close, or show all steps"],
    ["?", "these keys"],
  ];
  return (
    <dialog ref={of} aria-label="Keys" onClick={(event) => event.target === of.current && of.current?.close()}>
      <h2>Keys</h2>
      <dl class="pairs">
        {keys.map(([key, words]) => (
          <>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{words}</dd>
          </>
        ))}
      </dl>
      <p class="quiet small">Drag over a large chart to see a part of it.</p>
      <form method="dialog">
        <button type="submit">Close</button>
      </form>
    </dialog>
  );
}
