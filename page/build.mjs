// Bundles the page. Usage: node build.mjs OUTPUT_FOLDER
//
// index.html, page.js and page.css are the dashboard's; app.html is the MCP App: one file, because a host's frame may
// load nothing else. LICENSES.txt has the licences of the libraries inside both.
import { mkdir, readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";
import { minify } from "terser";

const here = path.dirname(fileURLToPath(import.meta.url));
const output = path.resolve(process.argv[2] ?? path.join(here, "../server/toprope_server/page"));
const LIBRARIES = ["preact", "uplot"];

async function bundle(entry, options) {
  const made = await build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    charset: "utf8",
    legalComments: "none",
    logLevel: "warning",
    ...options,
  });
  return made.outputFiles[0].text;
}

async function licences() {
  const texts = LIBRARIES.map(async (name) => {
    const { version } = JSON.parse(await readFile(path.join(here, "node_modules", name, "package.json"), "utf8"));
    return `${name} ${version}\n\n${(await readFile(path.join(here, "node_modules", name, "LICENSE"), "utf8")).trim()}\n`;
  });
  return (await Promise.all(texts)).join(`\n${"-".repeat(80)}\n\n`);
}

// Each place gets what it can use: a constant in the sources lets esbuild leave out the rest.
async function page(place) {
  const define = { PLACE: JSON.stringify(place) };
  // `h` in place of the automatic runtime, and a second minifier: three kilobytes of sixty.
  const jsx = { jsx: "transform", jsxFactory: "h", jsxFragment: "Fragment", inject: ["src/jsx.ts"], tsconfigRaw: {} };
  const text = await bundle("src/main.tsx", { define, format: "esm", target: "es2022", ...jsx });
  const { code } = await minify(text, { module: true, ecma: 2022, compress: { passes: 2, keep_fargs: false, lhs_constants: false, booleans: false }, format: { comments: false } });
  return code;
}

const [script, inFrame, style, logo, licence] = await Promise.all([
  page("browser"),
  page("client"),
  bundle("style/page.css", { target: "es2022" }),
  readFile(path.join(here, "style/logo.svg"), "utf8"),
  licences(),
]);
const icon = `data:image/svg+xml,${encodeURIComponent(logo.trim())}`;

function documentOf(styles, scripts) {
  return (
    `<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n` +
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n' +
    `<meta name="color-scheme" content="light dark">\n<title>Toprope</title>\n<link rel="icon" href="${icon}">\n` +
    `${styles}\n</head>\n<body>\n<div id="page"></div>\n${scripts}\n</body>\n</html>\n`
  );
}

// Inside a script element the parser looks for these two only; both are strings in the bundle and may be escaped.
const inline = inFrame.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
const files = {
  "page.js": script,
  "page.css": style,
  "index.html": documentOf('<link rel="stylesheet" href="page.css">', '<script type="module" src="page.js"></script>'),
  "app.html": documentOf(`<style>${style}</style>`, `<script type="module">${inline}</script>`),
  "LICENSES.txt": licence,
};
await mkdir(output, { recursive: true });
await Promise.all(Object.entries(files).map(([name, text]) => writeFile(path.join(output, name), text)));
const size = (text) => (gzipSync(text, { level: 9 }).length / 1024).toFixed(1);
console.log(`page.js ${size(script)} kB, page.css ${size(style)} kB, app.html ${size(files["app.html"])} kB (gzip)`);
