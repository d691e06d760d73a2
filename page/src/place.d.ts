/** Where this bundle is shown; `build.mjs` sets it. */
declare const PLACE: "browser" | "client";
