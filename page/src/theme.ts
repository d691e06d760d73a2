// Light, dark, or as the system or the client has it.
import { useEffect, useState } from "preact/hooks";
import { themeChanged } from "./charts/colours.ts";

const KEPT = "toprope.theme";
const THEMES = ["system", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

let theme: Theme = "system";
const watchers = new Set<(theme: Theme) => void>();

export function setTheme(next: Theme): void {
  theme = next;
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  themeChanged();
  for (const watcher of watchers) watcher(next);
}

/** The choice of this browser; a frame has no storage and follows its client. */
export function restoreTheme(): void {
  const kept = localStorage.getItem(KEPT);
  if (kept === "light" || kept === "dark") setTheme(kept);
}

export function nextTheme(): void {
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  localStorage.setItem(KEPT, next);
  setTheme(next);
}

export function useTheme(): Theme {
  const [now, set] = useState(theme);
  useEffect(() => {
    watchers.add(set);
    return () => void watchers.delete(set);
  }, []);
  return now;
}
