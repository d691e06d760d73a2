// Pictures of the page for the documentation: PAGE_PICTURES is the folder for them.
import { mkdirSync } from "node:fs";
import path from "node:path";
import { screensOf, settled, start, tab, visit } from "./browser.mjs";

const address = process.env.PAGE_ADDRESS;
const ids = JSON.parse(process.env.PAGE_IDS);
const folder = process.env.PAGE_PICTURES;
const all = process.env.PAGE_ALL === "1";
const origin = new URL(address).origin;
mkdirSync(folder, { recursive: true });
const chrome = await start();
const { page, seen } = await tab(chrome.browser, { origins: [origin] });
await page.goto(address);
await settled(page, "The rope");

const screens = Object.entries(screensOf(ids)).filter(([name]) => all || name === "now" || name === "run");
for (const [kind, width, scale, dark] of [["light", 1440, 1, false], ["dark", 1440, 1, true], ["phone", 390, 2, false]]) {
  await page.setViewport({ width, height: width > 500 ? 900 : 844, deviceScaleFactor: scale });
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: dark ? "dark" : "light" },
    { name: "prefers-reduced-motion", value: "reduce" },
  ]);
  for (const [name, [where, wanted]] of screens) {
    await visit(page, where, wanted);
    // Charts below the window are drawn when they come into view.
    await page.evaluate(async () => {
      for (let top = 0; top < document.documentElement.scrollHeight; top += innerHeight) {
        scrollTo(0, top);
        await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
      }
      scrollTo(0, 0);
    });
    await page.waitForNetworkIdle({ idleTime: 300, timeout: 5000, concurrency: 1 }).catch(() => undefined);
    const file = path.join(folder, `${name.replaceAll(" ", "-")}-${kind}.webp`);
    const height = await page.evaluate(() => document.documentElement.scrollHeight);
    const clip = { x: 0, y: 0, width, height: Math.min(height, kind === "phone" ? 1700 : all ? 3000 : 1640) };
    await page.screenshot({ path: file, type: "webp", quality: 88, clip, captureBeyondViewport: true });
    console.log(file);
  }
}
if (seen.errors.length) console.error(seen.errors);
await chrome.close();
