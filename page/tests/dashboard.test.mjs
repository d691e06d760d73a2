// The page in a browser, on a real dashboard with real runs. PAGE_ADDRESS works once; PAGE_IDS names runs by their role.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import path from "node:path";
import { after, before, test } from "node:test";
import { axeViolations, screensOf, settled, start, tab, textOf, visit } from "./browser.mjs";

const address = process.env.PAGE_ADDRESS;
const readOnlyAddress = process.env.PAGE_READ_ONLY_ADDRESS;
const ids = JSON.parse(process.env.PAGE_IDS);
const heldout = JSON.parse(process.env.PAGE_HELDOUT);
const hostile = process.env.PAGE_HOSTILE;
const origin = new URL(address).origin;
let chrome;
let page;
let seen;

before(async () => {
  chrome = await start();
  ({ page, seen } = await tab(chrome.browser, { origins: [origin], expected: [/403|401|404|409|400/] }));
  await page.goto(address);
  await settled(page, "The rope");
});
after(() => chrome?.close());

const click = async (text, selector = "button") => {
  await page.waitForFunction((words, which) => [...document.querySelectorAll(which)].some((node) => node.innerText.trim() === words && !node.disabled), { timeout: 15_000 }, text, selector);
  await page.evaluate((words, which) => [...document.querySelectorAll(which)].find((node) => node.innerText.trim() === words).click(), text, selector);
};

const freshKey = () =>
  page.evaluate(async () => {
    const [token] = JSON.parse(sessionStorage.getItem("toprope.token"));
    const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json", "X-Toprope": "1" };
    return (await (await fetch("/api/key", { method: "POST", headers, body: "{}" })).json()).key;
  });

test("the key leaves the address, and works once", async () => {
  assert.ok(!page.url().includes("key="), page.url());
  const other = await tab(await chrome.browser.createBrowserContext(), { origins: [origin], expected: [/403/] });
  await other.page.goto(address);
  await other.page.waitForFunction(() => document.body.innerText.includes("toprope dashboard"), { timeout: 10_000 });
  assert.ok(!(await other.page.$("nav")), "nothing of the home is shown");
  await other.page.close();
});

test("a link that was opened in a tab of its own leads there", async () => {
  const other = await tab(chrome.browser, { origins: [origin] });
  await other.page.goto(`${origin}/#/run/${ids.good}`);
  await settled(other.page, "Settings and rope");
  assert.deepEqual(other.seen.errors, []);
  await other.page.close();
});

for (const [name, [where, wanted]] of Object.entries(screensOf(ids))) {
  for (const dark of [false, true]) {
    test(`${name}, ${dark ? "dark" : "light"}: is drawn, and axe finds nothing`, async () => {
      await page.emulateMediaFeatures([
        { name: "prefers-color-scheme", value: dark ? "dark" : "light" },
        { name: "prefers-reduced-motion", value: "reduce" },
      ]);
      await visit(page, where, wanted);
      assert.deepEqual(await axeViolations(page), []);
    });
  }
  test(`${name}: fits on a phone`, async () => {
    await page.setViewport({ width: 390, height: 844 });
    await visit(page, where, wanted);
    const over = await page.evaluate(() =>
      document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("main *")].filter((node) => node.getBoundingClientRect().right > innerWidth + 1).slice(0, 4).map((node) => `${node.tagName}.${node.className}`),
    );
    const violations = await axeViolations(page);
    await page.setViewport({ width: 1440, height: 900 });
    assert.deepEqual([...over, ...violations], []);
  });
}

test("a link leads to every state: order, group, curve, part, table", async () => {
  await visit(page, `#/run/${ids.good}?order=newest`, "Rollouts");
  await page.waitForSelector(".groupline");
  await page.click(".groupline");
  await page.waitForSelector(".conversation .messages");
  const said = await textOf(page, ".conversation");
  await visit(page, `${new URL(page.url()).hash}&curve=success&from=50&to=150&table=main&events=all`, "Success over steps");
  await page.reload();
  await settled(page, "Success over steps");
  await page.waitForSelector(".conversation .messages");
  assert.equal(await textOf(page, ".conversation"), said);
  await page.waitForSelector(".maincurve details[open] tbody tr");
  await page.waitForFunction(() => [...document.querySelectorAll("button")].some((node) => node.innerText === "Show all steps"));
});

/** A tab whose answers pass through `change`, by the beginning of their paths. */
async function changed(prefix, change, where) {
  const other = await tab(chrome.browser, { origins: [origin] });
  const through = (begins, pass) => {
    const ask = globalThis.fetch;
    globalThis.fetch = async (path, ...rest) => {
      const response = await ask(path, ...rest);
      if (!String(path).startsWith(begins)) return response;
      const answer = await response.json();
      pass(answer);
      return new Response(JSON.stringify(answer));
    };
  };
  await other.page.evaluateOnNewDocument(`(${through})(${JSON.stringify(prefix)}, ${change})`); // the policy forbids eval
  await other.page.evaluateOnNewDocument(() => {
    const arc = Path2D.prototype.arc;
    globalThis.dots = 0;
    Path2D.prototype.arc = function (...place) {
      globalThis.dots += 1;
      return arc.apply(this, place);
    };
  });
  await other.page.goto(`${origin}/#key=${await freshKey()}&${where}`);
  return other.page;
}

test("damaged records are told, a value alone is a dot, and nothing is praised without a step", async () => {
  const other = await changed(
    `/api/run/${ids.good}`,
    ({ live }) => {
      if (!live) return;
      Object.assign(live, { damage: ["7 lines are damaged."], findings: [] });
      live.facts.steps = 0;
      live.account = { ...live.account, begun: 20, posted: 12, unanswered: 1, given_up: { timeout: 2 } };
      const { entropy } = live.series.columns;
      for (const kind of ["mean", "low", "high"]) entropy[kind] = entropy[kind].map((value, i) => (i ? null : value));
    },
    `/run/${ids.good}`,
  );
  await settled(other, "7 lines are damaged.");
  await other.waitForFunction(() => globalThis.dots > 0);
  const text = await textOf(other);
  assert.ok(!text.includes("Nothing found") && text.includes("2 timeout (given up) + 5 in progress"), text);
  await other.close();
});

test("an empty home tells how to begin, and names only commands that exist", async () => {
  const begin = await changed("/api/now", (now) => Object.assign(now, { live: [], last_end: null, counts: { runs: 0, live: 0, sweeps: 0 } }), "/now");
  await settled(begin, "'toprope clients'");
  await begin.close();
  const sweeps = await changed("/api/sweeps", (answer) => Object.assign(answer, { sweeps: [] }), "/sweeps");
  await settled(sweeps, "No sweep yet.");
  assert.ok(!(await textOf(sweeps)).includes("toprope sweep"));
  await sweeps.close();
});

test("a sweep says of which measurement each number is", async () => {
  await visit(page, `#/sweep/${ids.sweep}`, "validation score, biased upwards");
  await settled(page, "held-out, 95 % interval");
});

test("without a verdict no costs are given", async () => {
  await visit(page, `#/compare?a=${ids.good}&b=${ids.good}`, "No paired verdict");
  const text = await textOf(page);
  assert.ok(!text.includes("Cost of side") && !text.includes("Not measured."), text);
});

test("every chart has a table with a row for each of its points", async () => {
  await visit(page, `#/run/${ids.good}`, "Settings and rope");
  const charts = (await page.$$("figure.chart")).length;
  assert.ok(charts >= 7, `${charts} charts`);
  for (const summary of await page.$$("figure.chart summary")) await summary.evaluate((node) => node.click());
  await page.waitForFunction((n) => document.querySelectorAll("figure.chart details tbody").length >= n, {}, charts);
  const rows = await page.$$eval("figure.chart", (all) => all.map((one) => one.querySelectorAll("tbody tr").length));
  assert.ok(rows.every((n) => n >= 20 && n <= 420), String(rows));
});

test("keys: screens, runs, search, help, points of a chart", async () => {
  await visit(page, "#/now", "The rope");
  await page.keyboard.press("l");
  await settled(page, "Handoff");
  await page.keyboard.press("j");
  await page.waitForFunction(() => /#\/(run|sweep)\//.test(location.hash));
  const first = await page.evaluate(() => location.hash);
  await page.keyboard.press("j");
  await page.waitForFunction((old) => location.hash !== old, {}, first);
  await page.keyboard.press("k");
  await page.waitForFunction((old) => location.hash === old, {}, first);
  await visit(page, `#/run/${ids.good}?find=spell`, "Settings and rope");
  await page.waitForFunction(() => document.querySelectorAll(".runs section a").length > 1);
  await page.keyboard.press("k");
  await page.waitForFunction((old) => !location.hash.includes(old) && location.hash.endsWith("find=spell"), {}, ids.good);
  await page.keyboard.press("/");
  assert.equal(await page.evaluate(() => document.activeElement.id), "find");
  await page.keyboard.press("Escape");
  await page.keyboard.press("?");
  await page.waitForSelector("dialog[open]");
  await page.keyboard.press("Escape");
  await visit(page, `#/run/${ids.good}`, "Settings and rope");
  await page.focus(".maincurve .plot");
  await page.keyboard.press("End");
  const last = await textOf(page, ".maincurve .reading");
  await page.keyboard.press("ArrowLeft");
  const before = await textOf(page, ".maincurve .reading");
  assert.match(last, /^step 300: /);
  assert.match(before, /^step \d+: .* %/);
  assert.notEqual(last, before);
});

test("texts of agents stay texts, and unseen characters are marked", async () => {
  await visit(page, "#/ledger", "Handoff");
  const shown = await textOf(page);
  assert.ok(shown.includes('<img src=x onerror="window.owned = 1">') && shown.includes("<script>"), shown.slice(0, 400));
  assert.ok(!shown.includes("\u202e"), "the character that reorders text is not passed on");
  assert.equal(await page.evaluate(() => window.owned), undefined);
  assert.equal(await page.$("main img, main script"), null);
  assert.ok(hostile.includes("\u202e"));
});

test("nothing moves for who asked for that", async () => {
  await visit(page, "#/now", "The rope");
  assert.deepEqual(await page.evaluate(() => document.getAnimations().length), 0);
});

test("names of findings are written into their spans", async () => {
  const other = await tab(chrome.browser, { origins: [origin] });
  await other.page.evaluateOnNewDocument(() => {
    const write = CanvasRenderingContext2D.prototype.fillText;
    window.written = {};
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
      window.written[text] = this.textAlign;
      return write.call(this, text, ...place);
    };
  });
  await other.page.goto(`${origin}/#key=${await freshKey()}&/run/${ids.hot}`);
  await settled(other.page, "Findings");
  await other.page.waitForFunction(() => window.written["learning rate high"]);
  assert.equal(await other.page.evaluate(() => window.written["learning rate high"]), "left");
  await other.page.close();
});

test("a live run moves without a reload", async () => {
  await visit(page, `#/run/${ids.live}`, "Settings and rope");
  const steps = () => page.$eval(".verdict .figures dd", (node) => Number(node.innerText.split(" of ")[0].replaceAll(",", "")));
  const first = await steps();
  await page.waitForFunction((old) => Number(document.querySelector(".verdict .figures dd").innerText.split(" of ")[0].replaceAll(",", "")) > old, { timeout: 30_000 }, first);
});

test("the owner allows one start and refuses another", async () => {
  await visit(page, "#/now", "The rope");
  assert.equal((await page.$$(".asked")).length, 2);
  assert.match(await textOf(page, ".asked"), /budget\.steps 9000/, "what the start changes is shown");
  await click("Allow this start");
  await page.waitForFunction(() => document.querySelector("main").innerText.includes("waits for the agent to start it"), { timeout: 15_000 });
  await click("Refuse");
  await page.waitForFunction(() => document.querySelectorAll(".asked").length === 1, { timeout: 15_000 });
});

test("the owner stops a run in two clicks, and resumes it", async () => {
  await visit(page, `#/run/${ids.live}`, "Settings and rope");
  await page.focus("button.danger");
  await page.keyboard.press("Enter");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.activeElement.matches(".outcome") && document.activeElement.innerText, { timeout: 30_000 });
  await page.waitForFunction(() => document.querySelector("h1 .pill").innerText === "stopped", { timeout: 60_000 });
  await click("Resume");
  await page.waitForFunction(() => document.querySelector("main").innerText.includes("attempt 2"), { timeout: 60_000 });
  await page.waitForFunction(() => [...document.querySelectorAll("button")].some((node) => node.innerText === "Stop"), { timeout: 60_000 });
  await click("Stop");
  await click("Click again to stop");
  await page.waitForFunction(() => document.querySelector("h1 .pill").innerText === "stopped", { timeout: 60_000 });
});

test("the owner notes an experiment, which the ledger then shows", async () => {
  await visit(page, "#/ledger?note=new", "Note");
  await page.type(".note textarea", "Twice the groups a step halve the noise.");
  await page.type(".note input", ids.good);
  await click("Note it");
  await page.waitForFunction(() => [...document.querySelectorAll("article")].some((node) => node.innerText.includes("Twice the groups a step")), { timeout: 15_000 });
  await visit(page, "#/now", "The rope");
  await page.waitForFunction(() => document.querySelector(".diary").innerText.includes("note"), { timeout: 15_000 });
});

test("the choice of runs to compare is what the search finds", async () => {
  await visit(page, `#/compare?find=${ids.hot}`, "Choose a run");
  await page.waitForFunction(() => document.querySelectorAll("select:first-of-type option").length > 1);
  const offered = await page.$$eval(".pair select", (all) => all.map((one) => [...one.options].slice(1).map((option) => option.value)));
  assert.deepEqual(offered, [[ids.hot], [ids.hot]]);
});

test("limits that the owner edits are shown at once, and also that they cannot be read", async () => {
  const file = path.join(process.env.TOPROPE_CONFIG, "limits.yaml");
  const text = readFileSync(file, "utf8");
  await visit(page, "#/now", "runs at once");
  writeFileSync(file, "concurrent_runs: [");
  await settled(page, "The rope cannot be read: nothing starts");
  assert.ok(!(await textOf(page)).includes("No limit is set"));
  writeFileSync(file, text);
  await settled(page, "runs at once");
});

test("a tab that the dashboard does not know any more is told what to do", async () => {
  const other = await tab(chrome.browser, { origins: [origin], expected: [/401/] });
  // At once: the answer may be there before anything is drawn.
  await other.page.evaluateOnNewDocument(() => {
    const ask = globalThis.fetch;
    globalThis.fetch = (where, ...rest) => (String(where).includes("/api/events") ? Promise.resolve(new Response("", { status: 401 })) : ask(where, ...rest));
  });
  await other.page.goto(`${origin}/#key=${await freshKey()}`);
  await settled(other.page, "the dashboard was started again");
  assert.match(await textOf(other.page, ".told"), /Run 'toprope dashboard'/);
  await other.page.close();
});

test("a dashboard that is silent is told as one that does not answer", async () => {
  const other = await tab(chrome.browser, { origins: [origin] });
  await other.page.evaluateOnNewDocument(() => {
    const [ask, later, within] = [globalThis.fetch, globalThis.setTimeout, AbortSignal.timeout];
    globalThis.setTimeout = (work, ms, ...rest) => later(work, ms === 40_000 ? 50 : ms, ...rest);
    AbortSignal.timeout = (ms) => within.call(AbortSignal, ms === 30_000 ? 50 : ms);
    globalThis.fetch = (where, options) => {
      if (String(where).includes("/api/enter")) return ask(where, options);
      return new Promise((_, reject) => options.signal.addEventListener("abort", () => reject(options.signal.reason)));
    };
  });
  await other.page.goto(`${origin}/#key=${await freshKey()}`);
  await settled(other.page, "The dashboard does not answer"); // the last question has been given up
  assert.match(await textOf(other.page), /^The dashboard does not answer; .* If it was ended: Run 'toprope dashboard'.*$/, "said once");
  await other.page.close();
});

test("a read-only dashboard has no action", { skip: !readOnlyAddress }, async () => {
  const readOnly = new URL(readOnlyAddress).origin;
  const other = await tab(chrome.browser, { origins: [readOnly] });
  await other.page.goto(readOnlyAddress);
  await settled(other.page, "The rope");
  for (const where of ["#/now", `#/run/${ids.live}`, "#/ledger"]) {
    await visit(other.page, where, "");
    const words = await other.page.$$eval("main button", (all) => all.map((node) => node.innerText));
    assert.deepEqual(words.filter((word) => /Stop|Resume|Allow|Refuse|note/i.test(word)), []);
  }
  assert.deepEqual(other.seen.errors, []);
  await other.page.close();
});

test("in all that time: no violation, no error, nothing from elsewhere, no held-out text", async () => {
  assert.deepEqual(seen.csp, []);
  assert.deepEqual(seen.errors, []);
  assert.deepEqual(seen.foreign, []);
  assert.ok(heldout.length > 5 && seen.bodies.length > 30);
  assert.deepEqual(heldout.filter((text) => seen.bodies.some((body) => body.includes(text))), []);
});
