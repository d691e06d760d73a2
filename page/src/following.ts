// One run as it is followed: the whole answer once, afterwards only what is new.
import { useEffect, useState } from "preact/hooks";
import type { Change } from "./contract/common.ts";
import type { Column, Event, RunAnswer, RunFixed, RunLive, Series } from "./contract/run.ts";
import { onChange, Repeater, refusalOf, theSource } from "./live.ts";
import type { Refusal } from "./sources/source.ts";

const MOST_EVENTS = 1000;

export interface Followed {
  runId: string;
  at: number;
  gone: boolean;
  fixed: RunFixed | null;
  live: RunLive | null;
  /** All events seen, oldest first. */
  events: Event[];
  series: Series | null;
  refusal: Refusal | null;
}

/** What is known after another answer. Parts that did not change stay the same objects, so nothing redraws for them. */
export function joined(old: Followed, answer: RunAnswer): Followed {
  if (answer.gone || !answer.live) return { ...old, at: answer.at, gone: true, refusal: null };
  const { live } = answer;
  const first = old.live === null;
  const seen = old.events.at(-1)?.seq ?? -1;
  const fresh = first ? live.events : live.events.filter((event) => event.seq > seen);
  return {
    runId: old.runId,
    at: answer.at,
    gone: false,
    fixed: answer.fixed ?? old.fixed,
    live: stable(old.live, live),
    events: fresh.length ? [...old.events, ...fresh].slice(-MOST_EVENTS) : old.events,
    // While a long run is read, an answer may have no news of it.
    series: live.series && (live.series.x.length || live.series.complete) ? joinedSeries(old.series, live.series) : old.series,
    refusal: null,
  };
}

// An answer repeats lists that rarely change; keep the old object if it says the same.
function stable(old: RunLive | null, live: RunLive): RunLive {
  if (!old) return live;
  const made = { ...live } as unknown as Record<string, unknown>;
  const before = old as unknown as Record<string, unknown>;
  for (const name of ["findings", "checkpoints", "evaluations", "crew", "integrity", "models", "verdict", "account"]) {
    if (JSON.stringify(made[name]) === JSON.stringify(before[name])) made[name] = before[name];
  }
  return made as unknown as RunLive;
}

/** The old buckets before `from`, then the new ones; all new if the server counts from anew. */
export function joinedSeries(old: Series | null, next: Series): Series {
  if (!old || old.generation !== next.generation || next.from === 0) return next;
  const from = Math.min(next.from, old.x.length);
  const columns: Record<string, Column> = {};
  for (const name of new Set([...Object.keys(old.columns), ...Object.keys(next.columns)])) {
    const [head, tail] = [old.columns[name], next.columns[name]];
    const part = (kind: keyof Column) => [
      ...(head ? head[kind].slice(0, from) : blank(from)),
      ...(tail ? tail[kind] : blank(next.x.length)),
    ];
    columns[name] = { mean: part("mean"), low: part("low"), high: part("high") };
  }
  return { ...next, from: 0, x: [...old.x.slice(0, from), ...next.x], columns };
}

function blank(length: number): null[] {
  return new Array<null>(length).fill(null);
}

function concerns(change: Change, runId: string): boolean {
  return Boolean(change.all || change.runs?.[runId]?.length);
}

/** Follow a run while the component is on the screen. */
export function useRun(runId: string): Followed {
  const empty: Followed = { runId, at: 0, gone: false, fixed: null, live: null, events: [], series: null, refusal: null };
  const [state, set] = useState(empty);
  useEffect(() => {
    let now = empty;
    let ended = false;
    const repeater = new Repeater(async () => {
      try {
        const after = now.live?.cursor;
        const answer = await theSource().ask<RunAnswer>({ what: "run", run_id: runId, after });
        if (ended) return;
        now = joined(now, answer);
        if (now.gone) repeater.end();
        else if (answer.live?.series && !answer.live.series.complete) repeater.soon();
      } catch (error) {
        if (ended) return;
        now = { ...now, refusal: refusalOf(error) };
      }
      set(now);
    }, 900);
    set(empty);
    repeater.poke();
    const stop = onChange((change) => {
      // In a client every poll says that anything may have changed; a run that has ended is asked for once.
      if (concerns(change, runId) && !(theSource().place === "client" && now.live && !now.live.run.live)) repeater.poke();
    });
    return () => {
      ended = true;
      stop();
      repeater.end();
    };
  }, [runId]);
  return state.runId === runId ? state : empty;
}
