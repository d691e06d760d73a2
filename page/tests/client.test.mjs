// The page in a client's frame: a bare AppBridge host, the default policy, the real server over stdio.
import assert from "node:assert/strict";
import http from "node:http";
import path from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { Client } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";
import { build } from "esbuild";
import { axeViolations, settled, start, tab, textOf } from "./browser.mjs";

const EXTENSION = "io.modelcontextprotocol/ui";
const MIME = "text/html;profile=mcp-app";
const POLICY =
  "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; media-src 'self' data:; connect-src 'none'";
const MOST_CHARACTERS = 60_000;

const ids = JSON.parse(process.env.PAGE_IDS);
const heldout = JSON.parse(process.env.PAGE_HELDOUT);
const here = path.dirname(fileURLToPath(import.meta.url));
const results = [];
let chrome, client, server, page, seen, html;

async function connect(capabilities) {
  const made = new Client({ name: "page-test", version: "1" }, { capabilities });
  await made.connect(new StdioClientTransport({ command: process.env.PAGE_PYTHON, args: ["-P", "-m", "toprope_server.cli", "serve"], env: process.env, stderr: "ignore" }));
  return made;
}

before(async () => {
  client = await connect({ extensions: { [EXTENSION]: { mimeTypes: [MIME] } } });
  const [resource] = (await client.readResource({ uri: "ui://toprope/page" })).contents;
  assert.equal(resource.mimeType, MIME);
  html = resource.text.replace("<head>", `<head><meta http-equiv="Content-Security-Policy" content="${POLICY}">`);
  const host = await build({ entryPoints: [path.join(here, "host.mjs")], bundle: true, write: false, format: "iife", logLevel: "error" });
  server = http
    .createServer((request, response) => {
      const script = request.url === "/host.js";
      response.writeHead(request.url === "/favicon.ico" ? 204 : 200, { "content-type": script ? "text/javascript" : "text/html" });
      response.end(script ? host.outputFiles[0].text : '<!doctype html><html lang="en"><title>host</title><body><script src="/host.js"></script></body></html>');
    })
    .listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const origin = `http://127.0.0.1:${server.address().port}`;
  chrome = await start();
  ({ page, seen } = await tab(chrome.browser, { origins: [origin], width: 800 }));
  await page.goto(origin);
  await page.exposeFunction("callTool", async ({ name, arguments: given }) => {
    const result = await client.callTool({ name, arguments: given });
    results.push({ name, given, text: JSON.stringify(result) });
    return result;
  });
});
after(async () => {
  await chrome?.close();
  server?.close();
  await client?.close();
});

async function show(given, wanted, theme = "light") {
  const result = await client.callTool({ name: "show", arguments: given });
  results.push({ name: "show", given, text: JSON.stringify(result) });
  await page.evaluate((...all) => window.show(...all), html, result, theme);
  const frame = await (await page.waitForSelector("iframe")).contentFrame();
  await settled(frame, wanted);
  return { frame, result };
}

const press = (frame, words) =>
  frame.evaluate((text) => [...document.querySelectorAll("button, a")].find((node) => node.innerText.trim() === text).click(), words);

test("clients without the extension see neither tool", async () => {
  const plain = await connect({});
  const names = (await plain.listTools()).tools.map((tool) => tool.name);
  await plain.close();
  assert.ok(!names.includes("look") && !names.includes("show"), String(names));
  const own = (await client.listTools()).tools.map((tool) => tool.name);
  assert.ok(own.includes("look") && own.includes("show"));
});

for (const theme of ["light", "dark"]) {
  test(`a run, ${theme}: drawn from the result of show, and axe finds nothing`, async () => {
    const { frame, result } = await show({ run_id: ids.good }, "Settings and rope", theme);
    assert.ok(result.content[0].text.length < 4000, "the model is told in words");
    assert.ok((await frame.$$("figure.chart canvas")).length >= 7);
    const background = await frame.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
    assert.equal(Number(/\d+/.exec(background)[0]) < 60, theme === "dark", background);
    assert.deepEqual(await axeViolations(frame), []);
    assert.ok(await page.evaluate(() => window.sizes.length > 0), "the host is told the height");
  });
}

test("Now, and from there to a run by its link", async () => {
  const { frame } = await show({}, "The rope");
  assert.ok(!(await frame.$(".asked")), "no approval in a client");
  assert.deepEqual(await axeViolations(frame), []);
  await frame.click(".best a");
  await settled(frame, "Settings and rope");
});

test("the agent is asked by a message", async () => {
  const { frame } = await show({ run_id: ids.hot }, "Findings");
  await press(frame, "Ask the agent");
  await page.waitForFunction(() => window.messages.length === 1);
  assert.ok((await page.evaluate(() => window.messages[0].content[0].text)).includes(ids.hot));
});

test("a live run is polled while it is visible, and stopped in two clicks", async () => {
  const { frame } = await show({ run_id: ids.live }, "Settings and rope");
  const asked = () => results.filter((one) => one.name === "look" && one.given.run_id === ids.live && one.given.what === "run").length;
  const first = asked();
  const limit = Date.now() + 30_000;
  while (asked() < first + 2 && Date.now() < limit) await frame.waitForFunction(() => true, { polling: 200 });
  assert.ok(asked() >= first + 2);
  assert.ok(!(await textOf(frame)).includes("Resume"));
  await press(frame, "Stop");
  assert.equal(results.filter((one) => one.name === "stop_training").length, 0, "one click does nothing");
  await press(frame, "Click again to stop");
  await frame.waitForFunction(() => /stopp(ing|ed)/.test(document.querySelector("h1 .pill").innerText), { timeout: 60_000 });
  assert.equal(results.filter((one) => one.name === "stop_training").length, 1);
});

test("in all that time: no violation, no error, nothing asked elsewhere, no held-out text, no long result", async () => {
  assert.deepEqual(seen.csp, []);
  assert.deepEqual(seen.errors, []);
  assert.deepEqual(seen.foreign, []);
  assert.deepEqual(results.filter(({ name, text }) => name !== "stop_training" && text.length > MOST_CHARACTERS).map(({ given, text }) => [given, text.length]), []);
  assert.deepEqual(heldout.filter((text) => results.some((one) => one.text.includes(text))), []);
});
