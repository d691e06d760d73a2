// Answers about one run.
import type { Answer, Foreign, Level, RunItem, Share } from "./common.ts";

export type Value = Foreign | number | boolean | null;

export interface Setting {
  field: string;
  value: Value;
  default: Value;
  lock: string | null;
  reason: Foreign | null;
}

export interface RunFixed {
  preset: string | null;
  model: string;
  algorithm: string;
  seed: number;
  settings: Setting[];
  lineage: {
    base_run: string | null;
    continues: string | null;
    reproduces: string | null;
    dataset: string | null;
    sweep: string | null;
  };
  limits: { quantity: string; cap: number }[];
  folder: string;
}

export interface Finding {
  rule: string;
  level: Level;
  what: string;
  observed: Record<string, Value | string>;
  threshold: string;
  source: string;
  confidence: string;
  next: string;
  follows: string | null;
  from_step: number | null;
  to_step: number | null;
  open: boolean;
}

export interface Event {
  seq: number;
  at: number;
  kind: string;
  text: string;
  detail: Foreign | null;
  level: Level | null;
  step: number | null;
}

export interface Column {
  mean: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
}

export interface Series {
  generation: number;
  from: number;
  width: number;
  rows: number;
  last_step: number;
  complete: boolean;
  x: number[];
  columns: Record<string, Column>;
  /** What an author called a part of the reward, by its column: `part:0`. */
  names?: Record<string, Foreign>;
}

export interface Account {
  begun: number | null;
  posted: number | null;
  unanswered: number | null;
  given_up: Record<string, number>;
  accepted: number | null;
  waiting: number | null;
  delivered: number | null;
  committed: number | null;
  dropped: Record<string, number>;
}

export interface CrewMember {
  name: string;
  state: string;
  since: number;
  restarts: number;
  worker_restarts: number;
  exit_code: number | null;
}

export interface Evaluation {
  label: string;
  step: number | null;
  split: string;
  sampled: Share | null;
  greedy: Share | null;
}

export interface RunLive {
  cursor: string;
  run: RunItem;
  state: { reason: Foreign | null; since: number; attempt: number };
  verdict: {
    split: string;
    before: Share | null;
    after: Share | null;
    greedy: Share | null;
    sentence: string;
  } | null;
  facts: {
    steps: number;
    total_steps: number | null;
    rollouts: number | null;
    rollouts_per_second: number | null;
    training_s: number | null;
    total_s: number;
    cpu_s: number | null;
    gpu_s: number | null;
    usd: number | null;
  };
  integrity: { name: string; state: "ok" | "warning" | "unknown"; what: string }[] | null;
  evaluations: Evaluation[];
  models: { name: Foreign; accuracy: Share | null; error: Foreign | null; seconds: number; usd: number | null }[];
  checkpoints: { step: number; at: number }[];
  findings: Finding[];
  crew: CrewMember[];
  account: Account | null;
  failure: { component: string; kind: string; reason: Foreign; hint: string; excerpt: Foreign[] } | null;
  /** Records that cannot be read, in sentences. */
  damage: string[];
  may: { stop: boolean; resume: boolean };
  events: Event[];
  events_before: number;
  series: Series | null;
}

export interface RunAnswer extends Answer {
  run_id: string;
  gone: boolean;
  fixed?: RunFixed | null;
  live?: RunLive;
}

export interface Rollout {
  reward: number;
  success: boolean;
  truncated: boolean;
  error: Foreign | null;
  parts: { name: Foreign; value: number }[];
  answer: Foreign | null;
}

export interface GroupItem {
  group: number;
  task: Foreign;
  version: number | null;
  successes: number;
  size: number;
  prompt: Foreign | null;
  then: Rollout | null;
  shown: Rollout[];
}

export interface Rollouts extends Answer {
  run_id: string;
  order: string;
  groups: GroupItem[];
  matching: number;
  scanned: number;
  complete: boolean;
  next_cursor: string | null;
  why_none: string | null;
}

export interface Said {
  role: Foreign;
  text: Foreign;
}

export interface Group extends Answer {
  run_id: string;
  group: number;
  task: Foreign;
  policy_version: number | null;
  rollouts: (Omit<Rollout, "answer"> & { n: number; turns: number; messages: Said[] })[];
  asked: Said[];
  note: string | null;
  size: number;
  successes: number;
  next_cursor: string | null;
}

export interface Log extends Answer {
  run_id: string;
  component: string;
  lines: Foreign[];
}
