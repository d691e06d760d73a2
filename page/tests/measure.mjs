// Measures the page for `make bench-page`, which starts it. Prints JSON objects; on "quiet" and "busy" the benchmark stops
// and starts the rows of the live run, and answers with a line.
import { readdirSync, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { axeViolations, screensOf, settled, start, tab, visit } from "./browser.mjs";

const address = process.env.PAGE_ADDRESS;
const origin = new URL(address).origin;
const ids = JSON.parse(process.env.PAGE_IDS);
const heldout = JSON.parse(process.env.PAGE_HELDOUT);
const rows = Number(process.env.PAGE_ROWS);
const SECONDS = Number(process.env.PAGE_SECONDS);
const OPENINGS = 5;
const PLANTED_MS = 60;
const TICK_S = 0.01; // CLK_TCK of Linux

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
async function tell(word) {
  console.log(JSON.stringify({ tell: word }));
  await lines.next();
}
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

/** Processor seconds of a process and all its descendants. */
function cpuOf(root) {
  const stats = readdirSync("/proc").filter((name) => /^\d+$/.test(name)).flatMap((pid) => {
    try {
      const [, rest] = /\) (.*)$/s.exec(readFileSync(`/proc/${pid}/stat`, "utf8"));
      const fields = rest.split(" ");
      return [{ pid: Number(pid), parent: Number(fields[1]), ticks: Number(fields[11]) + Number(fields[12]) }];
    } catch {
      return [];
    }
  });
  const family = new Set([root]);
  for (let grown = true; grown; ) {
    grown = false;
    for (const { pid, parent } of stats) if (family.has(parent) && !family.has(pid)) grown = Boolean(family.add(pid));
  }
  return stats.filter(({ pid }) => family.has(pid)).reduce((sum, { ticks }) => sum + ticks, 0) * TICK_S;
}

const chrome = await start();
const root = chrome.browser.process().pid;
const figures = {};

let seen = { errors: [] };

/** Seconds from the start of the navigation until the large chart spans the whole run and the list shows its runs, and
 * until the chart has every step: before that it shows a sample and says so. */
async function untilChart(page, where) {
  await page.evaluateOnNewDocument((last) => {
    const look = () => {
      const told = document.querySelector(".maincurve .plot canvas") && document.querySelector(".maincurve .plot").getAttribute("aria-label");
      const step = Number(/at step ([\d,]+)\. Arrow/.exec(told ?? "")?.[1]?.replaceAll(",", "") ?? 0);
      if (!window.wholeChart && step >= last && document.querySelectorAll(".runs a").length >= 40) window.wholeChart = performance.now();
      if (window.wholeChart && !document.querySelector(".maincurve").textContent.includes("a sample, while")) window.exactChart = performance.now();
      else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  }, rows);
  await page.goto(where);
  await page.waitForFunction(() => window.exactChart, { timeout: 60_000 }).catch(async (error) => {
    const label = () => document.querySelector(".maincurve .plot")?.getAttribute("aria-label") ?? document.body.innerText.slice(0, 300);
    throw new Error(`no whole chart within 60 s: ${await page.evaluate(label)} ${seen.errors}`, { cause: error });
  });
  return page.evaluate(() => ({ whole: window.wholeChart / 1000, exact: window.exactChart / 1000 }));
}

const watched = await tab(chrome.browser, { origins: [origin] });
const { page } = watched;
seen = watched.seen;
const route = `/run/${ids.live}`;
const cold = await untilChart(page, `${address}&${route}`);
figures.first_chart_cold_seconds = cold.whole;
figures.exact_chart_cold_seconds = cold.exact;

const opened = [];
for (let i = 0; i < OPENINGS; i += 1) {
  const key = await page.evaluate(async () => {
    const [token] = JSON.parse(sessionStorage.getItem("toprope.token"));
    const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json", "X-Toprope": "1" };
    return (await (await fetch("/api/key", { method: "POST", headers, body: "{}" })).json()).key;
  });
  const fresh = await tab(await chrome.browser.createBrowserContext(), { origins: [origin] });
  opened.push((await untilChart(fresh.page, `${origin}/#key=${key}&${route}`)).whole);
  await fresh.page.browserContext().close();
}
figures.first_chart_seconds = opened.sort((a, b) => a - b)[Math.floor(OPENINGS / 2)];

/** Processor milliseconds of an update of the screen as it is, idle subtracted. */
async function updateCost() {
  const looks = () => page.evaluate(() => performance.getEntriesByType("resource").filter((one) => one.name.includes("/look")).length);
  await page.evaluate(() => performance.setResourceTimingBufferSize(100_000));
  await tell("quiet");
  await pause(3);
  let cpu = cpuOf(root);
  await pause(SECONDS);
  const idle = cpuOf(root) - cpu;
  await tell("busy");
  await pause(3);
  const before = await looks();
  cpu = cpuOf(root);
  await pause(SECONDS);
  const busy = cpuOf(root) - cpu;
  const updates = (await looks()) - before;
  return { ms: Math.max(0, ((busy - idle) * 1000) / updates), updates, idle };
}

await page.bringToFront();
await page.setViewport({ width: 1440, height: 1400, deviceScaleFactor: 1 });
await page.evaluate(() => scrollTo(0, 0));
figures.charts = await page.$$eval("figure.chart", (all) => all.filter((one) => one.getBoundingClientRect().top < innerHeight).length);
const whole = await updateCost();
figures.run_update_cpu_ms = whole.ms;
figures.updates = whole.updates;
figures.idle_cpu_share = whole.idle / SECONDS;
// The small charts are below the window, where nothing is drawn, so that one chart changes.
await page.setViewport({ width: 1440, height: 640, deviceScaleFactor: 1 });
await page.evaluate(() => scrollTo(0, 0));
figures.charts_alone = await page.$$eval("figure.chart", (all) => all.filter((one) => one.getBoundingClientRect().top < innerHeight).length);
figures.update_cpu_ms = (await updateCost()).ms;
// The control: the page works so much longer after each answer.
await page.evaluate((ms) => {
  const work = () => { for (const until = performance.now() + ms; performance.now() < until; ); };
  window.planted = new PerformanceObserver((list) => list.getEntries().filter(({ name }) => name.includes("/look")).forEach(work));
  window.planted.observe({ type: "resource" });
}, PLANTED_MS);
figures.control_update_cpu_ms = (await updateCost()).ms;
await page.evaluate(() => window.planted.disconnect());

console.log(JSON.stringify({ measured: figures }));

// What must never be: through every screen, in both themes.
const violations = [];
await page.setViewport({ width: 1440, height: 900, deviceScaleFactor: 1 });
let text = "";
for (const dark of [false, true]) {
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }]);
  for (const [name, [where, wanted]] of Object.entries(screensOf(ids))) {
    await visit(page, where, wanted);
    await settled(page, wanted);
    text += await page.evaluate(() => document.body.innerText);
    violations.push(...(await axeViolations(page)).map((one) => `${name}: ${one}`));
  }
}
const heldoutSeen = () => heldout.filter((one) => text.includes(one) || seen.bodies.some((body) => body.includes(one))).length;
const counts = () => ({
  csp_violations: seen.csp.length,
  console_errors: seen.errors.length,
  foreign_requests: seen.foreign.length,
  heldout_texts_seen: heldoutSeen(),
});
Object.assign(figures, counts(), { axe_violations: violations.length, answers_read: seen.bodies.length, heldout_texts: heldout.length });

// The control: one of each, planted.
await page.evaluate((words) => {
  console.error("planted");
  void fetch("https://planted.invalid/").catch(() => undefined); // a violation of the policy
  const image = document.createElement("img");
  image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
  document.querySelector("main").append(words, image);
}, heldout[0]);
await pause(1);
text += await page.evaluate(() => document.body.innerText);
const seenByAxe = (await axeViolations(page)).length;
// The policy of the page stops a fetch before it is a request, but not a navigation.
await page.evaluate(() => void (location.href = "https://planted.invalid/"));
await pause(1);
const planted = { ...counts(), axe_violations: seenByAxe };
const missed = Object.entries(planted).filter(([name, count]) => count <= figures[name]).map(([name]) => name);
await chrome.close();
console.log(JSON.stringify({ figures, missed, details: [...violations, ...seen.csp.slice(0, 3), ...seen.errors.slice(0, 5), ...seen.foreign.slice(0, 3)].slice(0, 12) }));
process.exit(0);
