// Small parts of screens.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface CardProps {
  title?: ComponentChildren;
  /** What the title does not say: the measure, the source. */
  note?: ComponentChildren;
  class?: string;
  id?: string;
  children?: ComponentChildren;
}

export function Card({ title, note, class: more = "", id, children }: CardProps) {
  return (
    <section class={`card ${more}`} id={id}>
      {(title || note) && (
        <header>
          <h2>{title}</h2>
          {note && <small>{note}</small>}
        </header>
      )}
      {children}
    </section>
  );
}

export type Tone = "good" | "bad" | "warn" | "blue" | "";

export function Pill({ tone = "", children }: { tone?: Tone; children: ComponentChildren }) {
  return <span class={`pill ${tone}`}>{children}</span>;
}

export function Nothing({ children }: { children: ComponentChildren }) {
  return <p class="nothing">{children}</p>;
}

/** Named figures in a row. */
export function Figures({ of }: { of: readonly (readonly [string, ComponentChildren] | null | false)[] }) {
  return (
    <dl class="figures">
      {of.map(
        (one) =>
          one && (
            <div>
              <dt>{one[0]}</dt>
              <dd>{one[1]}</dd>
            </div>
          ),
      )}
    </dl>
  );
}

/** Tabs are links, because each has an address. */
export function Tabs({ of, chosen, label }: { of: readonly (readonly [string, string, string])[]; chosen: string; label: string }) {
  return (
    <nav class="tabs" aria-label={label}>
      {of.map(([name, words, address]) => (
        <a href={address} aria-current={name === chosen ? "true" : undefined}>
          {words}
        </a>
      ))}
    </nav>
  );
}

/** A share as a bar. `limit`: of something that must not be used up. */
export function Bar({ share, label, limit }: { share: number; label: string; limit?: boolean }) {
  const used = Math.min(Math.max(share, 0), 1);
  return (
    <div
      class={`bar ${limit && used >= 0.6 ? "near" : ""}`}
      role="meter"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.round(used * 100)}
    >
      <i style={{ width: `${(used * 100).toFixed(1)}%` }} />
    </div>
  );
}

const ARMED_MS = 5000;

/** A button that acts on its second click; the first one says so, and is forgotten after five seconds. */
export function TwoClicks({ children, again, onConfirmed, disabled }: {
  children: ComponentChildren;
  again: string;
  onConfirmed: () => void;
  disabled?: boolean;
}) {
  const [armed, setArmed] = useState(false);
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  return (
    <button
      type="button"
      class={`danger ${armed ? "armed" : ""}`}
      disabled={disabled}
      onClick={() => {
        clearTimeout(timer.current);
        setArmed(!armed);
        if (armed) onConfirmed();
        else timer.current = setTimeout(() => setArmed(false), ARMED_MS) as unknown as number;
      }}
    >
      {armed ? again : children}
    </button>
  );
}

const ICONS = {
  rope: "M12 2v5M12 7c4.200 0 6.500 2.600 6.500 6 0 4.600-3.200 8.500-6.500 8.500S5.500 17.600 5.500 13c0-3.400 2.300-6 6.500-6Z",
  lock: "M7 11V8a5 5 0 0 1 10 0v3M6 11h12v9H6Z",
  tick: "M5 12.500l4.500 4.500L19 7.500",
  cross: "M6 6l12 12M18 6L6 18",
  warning: "M12 4L2.500 20h19ZM12 10v4M12 17v.1",
} as const;

export function Icon({ name }: { name: keyof typeof ICONS }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="2.2" stroke-linecap="round" stroke-linejoin="round">
      <path d={ICONS[name]} />
    </svg>
  );
}
