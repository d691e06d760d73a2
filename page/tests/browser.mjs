// A real browser for tests, pictures and measurements, and everything that the page must never do, counted.
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import path from "node:path";
import puppeteer from "puppeteer-core";

const PROGRAMS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

export function chromium() {
  const named = process.env.TOPROPE_CHROMIUM;
  const found = (process.env.PATH ?? "").split(path.delimiter).flatMap((folder) => PROGRAMS.map((name) => path.join(folder, name)));
  const program = [named, ...found].find((file) => file && existsSync(file));
  if (!program) throw new Error("Chromium is missing: install it, or name it in TOPROPE_CHROMIUM.");
  return program;
}

/** Start a browser with a profile of its own; `close` removes that. */
export async function start() {
  const profile = mkdtempSync(path.join(tmpdir(), "toprope-chromium-"));
  const browser = await puppeteer.launch({
    executablePath: chromium(),
    userDataDir: profile,
    args: [
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--disable-quic",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
    ],
  });
  return {
    browser,
    profile,
    close: async () => {
      await browser.close();
      rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
    },
  };
}

/** A tab with counters. `origins`: what it may ask; `expected`: console errors that a test provokes. */
export async function tab(browser, { origins, width = 1440, height = 900, scale = 1, dark = false, still = true, expected = [] }) {
  const page = await browser.newPage();
  const seen = { csp: [], errors: [], foreign: [], bodies: [] };
  await page.setViewport({ width, height, deviceScaleFactor: scale });
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: dark ? "dark" : "light" },
    { name: "prefers-reduced-motion", value: still ? "reduce" : "no-preference" },
  ]);
  page.on("console", (message) => {
    const text = `${message.text()} ${message.location()?.url ?? ""}`;
    if (/Content Security Policy/.test(text)) seen.csp.push(text);
    else if (message.type() === "error" && !expected.some((pattern) => pattern.test(text))) seen.errors.push(text);
  });
  page.on("pageerror", (error) => seen.errors.push(String(error?.stack ?? error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!/^(data|blob|about):/.test(url) && !origins.some((origin) => url.startsWith(`${origin}/`))) seen.foreign.push(url);
  });
  page.on("response", (response) => {
    if (!/\/api\//.test(response.url()) || /\/events/.test(response.url())) return;
    response.text().then((text) => seen.bodies.push(text), () => undefined);
  });
  return { page, seen };
}

/** Violations of WCAG 2 A and AA that axe-core finds. */
export async function axeViolations(frame) {
  await frame.evaluate(AXE);
  const found = await frame.evaluate(() =>
    globalThis.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], resultTypes: ["violations"] }),
  );
  return found.violations.map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.target} ${node.failureSummary?.split("\n")[1] ?? ""}`).join(" | ")}`);
}

/** Go to an address of the page and wait until its screen has an answer. */
export async function visit(page, address, wanted) {
  await page.evaluate((hash) => void (location.hash = hash), address);
  await settled(page, wanted);
}

/** Wait until the text is on the screen and nothing is being read. */
export async function settled(page, wanted, limit = 30_000) {
  const there = (text) => {
    const main = document.querySelector("main");
    return main && !main.querySelector(".loading") && main.innerText.includes(text);
  };
  try {
    await page.waitForFunction(there, { timeout: limit, polling: 50 }, wanted);
  } catch (error) {
    const shown = await page.evaluate(() => `${location.hash}: ${document.querySelector("main")?.innerText.slice(0, 300)}`);
    throw new Error(`"${wanted}" did not appear within ${limit / 1000} s on ${shown}`, { cause: error });
  }
}

export const textOf = (page, selector = "main") => page.$eval(selector, (node) => node.innerText);

/** The screens of a home, with their addresses and a text that each must show. */
export function screensOf(ids) {
  const screens = {
    now: ["#/now", "The rope"],
    run: [`#/run/${ids.good}`, "Settings and rope"],
    "run that collapsed": [`#/run/${ids.hot}`, "Findings"],
    compare: [`#/compare?a=${ids.good}&b=${ids.hot}`, "Reward over steps"],
    sweeps: ["#/sweeps", "Sweeps"],
    datasets: ["#/datasets", "Data sets"],
    ledger: ["#/ledger", "Handoff"],
    environments: ["#/environments?query=spell", "reasoning_gym/spell_backward"],
    environment: [`#/environment/${encodeURIComponent("reasoning_gym/spell_backward")}`, "Runs here"],
    rope: ["#/rope", "Limits"],
  };
  if (ids.sft) screens["run of sft"] = [`#/run/${ids.sft}`, "Loss over steps"];
  if (ids.sweep) {
    screens.sweep = [`#/sweep/${ids.sweep}`, "Candidates"];
    screens.dataset = ["#/dataset/good@v1", "Made of"];
  }
  return screens;
}
