// Where the page begins: it finds out in which of its two places it is, and asks there.
import { render } from "preact";
import { App } from "./app.tsx";
import { refusalOf, startFollowing } from "./live.ts";
import { Refused } from "./parts/answers.tsx";
import { go, link, startInAddress } from "./router.ts";
import { joinHost } from "./sources/client.ts";
import { enter } from "./sources/dashboard.ts";
import { restoreTheme, setTheme } from "./theme.ts";

const SHOWN_WITHIN_MS = 3000;
const page = document.getElementById("page")!;

async function inBrowser(): Promise<void> {
  restoreTheme();
  startFollowing(await enter(startInAddress()));
}

async function inClient(): Promise<void> {
  const { source, opened } = await joinHost((context) => {
    if (context.theme) setTheme(context.theme);
  });
  // A host that never sends the result of 'show' still gets Now.
  const late = new Promise<null>((resolve) => setTimeout(() => resolve(null), SHOWN_WITHIN_MS));
  const first = await Promise.race([opened, late]);
  source.keep(first?.answer ?? null);
  if (first?.runId) go(link(["run", first.runId]));
  startFollowing(source);
  source.reportSize(page);
}

try {
  await (PLACE === "client" ? inClient() : inBrowser());
  render(<App />, page);
} catch (error) {
  render(
    <main class="main alone">
      <h1>Toprope</h1>
      <Refused refusal={refusalOf(error)} />
    </main>,
    page,
  );
}
