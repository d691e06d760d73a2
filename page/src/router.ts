// The state of the page as an address: a path and parameters. In the browser it lives in the URL's fragment, so that
// every state has a link and the Back button works; in a host's frame it lives in memory, because a frame has no address.
import { useEffect, useState } from "preact/hooks";

export interface Route {
  /** Screen and object, such as ["run", "word-261122-1048-36py"]. */
  path: string[];
  /** What is chosen on the screen. */
  at: Readonly<Record<string, string>>;
}

type Listener = (route: Route) => void;

const listeners = new Set<Listener>();
let current: Route = { path: ["now"], at: {} };
let inMemory = true;

export function parse(fragment: string): Route {
  const [path = "", query = ""] = fragment.replace(/^#?\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { path: parts.length ? parts : ["now"], at: Object.fromEntries(new URLSearchParams(query)) };
}

export function link(path: string | string[], at: Record<string, string | undefined | null> = {}): string {
  const parts = Array.isArray(path) ? path : [path];
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(at)) if (value) query.set(name, value);
  const text = query.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Start with the page's address. Returns the key in it, if it was opened with one, and removes that from the address. */
export function startInAddress(): string | null {
  inMemory = false;
  const key = /(?:^|[&?])key=([^&]+)/.exec(location.hash.slice(1))?.[1] ?? null;
  if (key) {
    const rest = location.hash.slice(1).replace(/[&?]?key=[^&]+/, "");
    history.replaceState(null, "", `${location.pathname}${rest ? `#${rest.replace(/^&/, "")}` : "#/now"}`);
  }
  current = parse(location.hash);
  addEventListener("hashchange", () => tell(parse(location.hash)));
  return key;
}

export function currentRoute(): Route {
  return current;
}

/** Go to an address made by `link`. `replace`: without a step for the Back button. */
export function go(address: string, replace = false): void {
  if (inMemory) return tell(parse(address));
  if (replace) {
    history.replaceState(null, "", address);
    tell(parse(address));
  } else if (location.hash !== address) location.hash = address;
}

/** Change parameters of the present address; empty ones are removed. */
export function choose(at: Record<string, string | undefined | null>, replace = true): void {
  go(link(current.path, { ...current.at, ...at }), replace);
}

/** Whether a list in the address, such as `table=main,Entropy`, has a name. */
export function listed(at: Readonly<Record<string, string>>, list: string, name: string): boolean {
  return (at[list] ?? "").split(",").includes(name);
}

/** Add a name to a list in the address, or take it out. */
export function setListed(list: string, name: string, there: boolean): void {
  const rest = (current.at[list] ?? "").split(",").filter((one) => one && one !== name);
  choose({ [list]: (there ? [...rest, name] : rest).join(",") });
}

/** Follow a link inside the frame, where addresses mean nothing. */
export function followed(event: MouseEvent): void {
  const anchor = (event.target as Element | null)?.closest?.("a[href^='#/']");
  if (!inMemory || !anchor) return;
  event.preventDefault();
  go(anchor.getAttribute("href") ?? "#/now");
}

function tell(route: Route): void {
  const moved = route.path.join("/") !== current.path.join("/");
  current = route;
  for (const listener of listeners) listener(route);
  if (moved) scrollTo(0, 0);
}

export function useRoute(): Route {
  const [route, set] = useState(current);
  useEffect(() => {
    listeners.add(set);
    set(current);
    return () => void listeners.delete(set);
  }, []);
  return route;
}
