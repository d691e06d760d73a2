// The documentation's site in a browser, from the disk: it asks no other place, draws its diagrams, and can be searched.
import assert from "node:assert/strict";
import path from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { start } from "./browser.mjs";

const site = process.env.SITE_FOLDER;
const asked = [];
let chrome, page;

before(async () => {
  chrome = await start();
  page = await chrome.browser.newPage();
  page.on("request", (request) => asked.push(request.url()));
});

after(async () => chrome?.close());

const open = (name) => page.goto(pathToFileURL(path.join(site, name)).href, { waitUntil: "load" });

test("diagrams are drawn", async () => {
  await open("architecture.html");
  await page.waitForFunction(() => [...document.querySelectorAll("div.mermaid")].filter((one) => one.clientHeight > 100).length === 2);
});

test("words are found", async () => {
  await open("index.html");
  await page.click('label.md-search__icon[for="__search"], label.md-header__button[for="__search"]').catch(() => undefined);
  await page.type(".md-search__input", "bubblewrap");
  await page.waitForSelector(".md-search-result__link");
  const found = await page.$$eval(".md-search-result__link", (links) => links.map((link) => link.getAttribute("href")));
  assert.ok(found.some((link) => link.includes("faults.html")), found.join(" "));
});

test("no other place was asked", () => {
  assert.ok(asked.length > 10);
  assert.deepEqual(asked.filter((url) => !/^(file|data|blob):/.test(url)), []);
});
