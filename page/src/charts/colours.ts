// Colours of the charts, taken from the stylesheet so that a canvas follows the theme.
import { useEffect, useState } from "preact/hooks";

export type Colour = "blue" | "orange" | "green" | "red" | "violet" | "grey" | "accent";

export interface Palette {
  of(colour: Colour): string;
  soft(colour: Colour, alpha: number): string;
  ink: string;
  quiet: string;
  grid: string;
  card: string;
  font: string;
}

let palette: Palette | null = null;
const watchers = new Set<() => void>();

/** Read the colours again; called whenever the theme may have changed. */
export function themeChanged(): void {
  palette = null;
  for (const watcher of watchers) watcher();
}

if (typeof matchMedia === "function") matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

export function colours(): Palette {
  palette ??= read();
  return palette;
}

/** The palette; the component is drawn again when the theme changes. */
export function usePalette(): Palette {
  const [, redraw] = useState(0);
  useEffect(() => {
    const watcher = () => redraw((n) => n + 1);
    watchers.add(watcher);
    return () => void watchers.delete(watcher);
  }, []);
  return colours();
}

// A custom property may hold light-dark(), which only a real property resolves.
function read(): Palette {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const resolved = (name: string) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const known = new Map<string, string>();
  const of = (name: string) => known.get(name) ?? (known.set(name, resolved(name)), known.get(name)!);
  const made: Palette = {
    of: (colour) => of(`chart-${colour}`),
    soft: (colour, alpha) => withAlpha(of(`chart-${colour}`), alpha),
    ink: of("ink"),
    quiet: of("quiet"),
    grid: of("grid"),
    card: of("card"),
    font: `11px ${getComputedStyle(document.body).fontFamily}`,
  };
  for (const name of ["blue", "orange", "green", "red", "violet", "grey", "accent"] as const) made.of(name);
  probe.remove();
  return made;
}

function withAlpha(colour: string, alpha: number): string {
  const parts = colour.match(/[\d.]+/g) ?? ["0", "0", "0"];
  return `rgba(${parts[0]}, ${parts[1]}, ${parts[2]}, ${alpha})`;
}
