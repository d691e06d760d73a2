// Answers that stay fresh: what a screen asked is asked again when the source tells of a change that concerns it.
import { useEffect, useState } from "preact/hooks";
import type { Answer, Change } from "./contract/common.ts";
import { type Question, Refusal, type Source } from "./sources/source.ts";

let source: Source;
const listeners = new Set<(change: Change) => void>();
const connections = new Set<(lost: string) => void>();
const kept = new Map<string, Answer>();
let lostNow = "";
const MOST_KEPT = 40;
const SOON_MS = 60;

export function startFollowing(from: Source): void {
  source = from;
  from.follow(told, (words) => {
    lostNow = words;
    connections.forEach((listener) => listener(words));
  });
}

export function theSource(): Source {
  return source;
}

/** Pass a change on; also called after an action of this page. */
export function told(change: Change): void {
  for (const listener of listeners) listener(change);
}

export function onChange(listener: (change: Change) => void): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

/** Words about a connection that is lost; none while it is there. */
export function useLost(): string {
  const [lost, set] = useState(lostNow);
  useEffect(() => {
    connections.add(set);
    set(lostNow); // the connection may have been lost between the drawing and this effect
    return () => void connections.delete(set);
  }, []);
  return lost;
}

export function refusalOf(error: unknown): Refusal {
  return error instanceof Refusal ? error : new Refusal(error instanceof Error ? error.message : String(error));
}

/** Repeats a request: one at a time, at most one in `pause` milliseconds, none while the page is hidden. */
export class Repeater {
  private running = false;
  private wanted = false;
  private last = -Infinity;
  private timer = 0;
  private ended = false;
  private impatient = false;
  private readonly seen = () => this.wanted && this.poke();

  constructor(
    private readonly request: () => Promise<void>,
    private readonly pause: number,
  ) {
    document.addEventListener("visibilitychange", this.seen);
  }

  /** Ask again at once, whatever the pause: the last answer said that more is being read. */
  soon(): void {
    this.impatient = true;
    this.poke();
  }

  poke(): void {
    this.wanted = true;
    if (this.running || this.timer || document.hidden || this.ended) return;
    const wait = this.impatient ? SOON_MS : Math.max(0, this.last + this.pause - performance.now());
    this.impatient = false;
    this.timer = setTimeout(() => void this.run(), wait) as unknown as number;
  }

  end(): void {
    this.ended = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
  }

  private async run(): Promise<void> {
    this.timer = 0;
    this.wanted = false;
    this.running = true;
    try {
      await this.request();
    } finally {
      this.running = false;
      this.last = performance.now();
      if (this.wanted) this.poke();
    }
  }
}

export interface Asked<T> {
  answer: T | null;
  refusal: Refusal | null;
  again: () => void;
}

/** One question that components ask; all of them share its requests. */
class Standing {
  answer: Answer | null = null;
  refusal: Refusal | null = null;
  readonly readers = new Set<() => void>();
  private readonly repeater: Repeater;
  private readonly stop: () => void;

  constructor(name: string, question: Question, concerns: (change: Change) => boolean, pause: number) {
    this.answer = kept.get(name) ?? null;
    this.repeater = new Repeater(async () => {
      try {
        this.answer = await source.ask(question);
        this.refusal = null;
        keep(name, this.answer);
      } catch (error) {
        // An answer that was there stays on the screen while the server is away.
        this.refusal = refusalOf(error);
      }
      for (const reader of this.readers) reader();
    }, pause);
    this.stop = onChange((change) => (change.all || concerns(change)) && this.again());
    this.again();
  }

  readonly again = () => this.repeater.poke();

  end(): void {
    this.stop();
    this.repeater.end();
  }
}

const standing = new Map<string, Standing>();

/** The answer to a question, asked again after changes that concern it.
 *
 * @param question null: ask nothing.
 * @param concerns Which changes make the answer old.
 * @param pause Milliseconds between two requests at least. */
export function useAnswer<T extends Answer>(
  question: Question | null,
  concerns: (change: Change) => boolean = () => false,
  pause = 2000,
): Asked<T> {
  const name = question ? JSON.stringify(question) : "";
  const [, redraw] = useState(0);
  useEffect(() => {
    if (!question) return;
    let mine = standing.get(name);
    if (!mine) standing.set(name, (mine = new Standing(name, question, concerns, pause)));
    const reader = () => redraw((n) => n + 1);
    mine.readers.add(reader);
    reader();
    return () => {
      mine.readers.delete(reader);
      if (mine.readers.size) return;
      mine.end();
      standing.delete(name);
    };
  }, [name]);
  const current = standing.get(name);
  return {
    answer: ((current?.answer ?? kept.get(name)) as T | undefined) ?? null,
    refusal: current?.refusal ?? null,
    again: current?.again ?? (() => undefined),
  };
}

function keep(name: string, answer: Answer): void {
  kept.delete(name);
  kept.set(name, answer);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value!);
}
