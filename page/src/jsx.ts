// What the build calls for each element.
export { Fragment, h } from "preact";
