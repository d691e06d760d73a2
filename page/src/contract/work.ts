// Answers about several runs, and about what an agent works with: sweeps, data sets, the ledger, environments.
import type { Answer, Foreign, Level, RunItem, Share, State } from "./common.ts";

export interface Measured {
  mean: number;
  low: number | null;
  high: number | null;
}

export interface Judged {
  verdict: "a" | "b" | "none";
  why: string;
  a: Measured;
  b: Measured;
  difference: { value: number; low: number | null; high: number | null };
  noise_floor: number | null;
  floor_basis: string | null;
  p_tasks: number | null;
  effect_h: number | null;
  tasks_only_a: number | null;
  tasks_only_b: number | null;
  rests_on: string[];
  tasks_needed: number | null;
  seeds_needed: number | null;
}

export interface Side {
  name: string;
  runs: string[];
  seeds: number[];
  cost: Record<string, number | null> | null;
}

export interface Comparison extends Answer {
  a: Side;
  b: Side;
  problem: { message: string; hint: string } | null;
  tasks: number | null;
  split: string | null;
  sampled: Judged | null;
  greedy: Judged | null;
  remarks: string[];
  /** Of the curves: Reward or Loss. */
  measure: string;
  runs: {
    run: RunItem;
    side: "a" | "b";
    series: { x: number[]; reward: (number | null)[]; low: (number | null)[]; high: (number | null)[] } | null;
  }[];
}

export interface SweepItem {
  run: RunItem;
  strategy: string;
  fields: string[];
  epochs: number;
  epochs_completed: number;
  measured: number;
  planned: number;
  best: { id: string; score: number | null } | null;
}

export interface Sweeps extends Answer {
  sweeps: SweepItem[];
}

export interface Candidate {
  id: string;
  run_id: string | null;
  epoch: number;
  parent: string | null;
  continues: string | null;
  values: Record<string, number | boolean | Foreign | null>;
  score: number | null;
  accuracy: number | null;
  line_steps: number;
  why: Foreign | null;
  survived: boolean;
  state: State | null;
  spark: (number | null)[] | null;
}

export interface Sweep extends Answer {
  run: RunItem;
  strategy: string;
  space: { field: string; says: string }[];
  epochs: number;
  epochs_completed: number;
  steps: number;
  most_steps: number | null;
  candidates: Candidate[];
  best: string | null;
  /** Candidates that the best is not told apart from, in a sentence. */
  rivals: string;
  heldout: { run_id: string | null; accuracy: Share | null; why: Foreign | null } | null;
}

export interface DataSets extends Answer {
  datasets: {
    name: string;
    versions: { version: number | string; made_at: number; items: number; bytes: number; description: Foreign; sources: number }[];
    inbox: boolean;
  }[];
  jobs: { id: string; doing: Foreign; read: number | null; kept: number | null }[];
}

export interface DataSet extends Answer {
  name: string;
  dataset_version: number | string;
  made_at: number;
  items: number;
  bytes: number;
  digest: string;
  description: Foreign;
  files: { name: string; items: number; bytes: number; sha256: string }[];
  counts: Record<string, unknown>;
  made_of: { kind: "run" | "dataset" | "inbox" | "file" | "step"; name: Foreign; count: number | null }[];
  strategy: Foreign | null;
  recipe: Foreign | null;
  used_by: RunItem[];
  other_versions: string[];
  card: Foreign;
}

export interface Experiment {
  id: string;
  at: number;
  updated_at: number;
  environment: string;
  hypothesis: Foreign;
  outcome: Foreign;
  decision: "keep" | "discard" | "repeat" | "undecided";
  question: Foreign | null;
  runs: RunItem[];
  gone_runs: string[];
  drafts: string[];
  accuracy: number | null;
}

export interface Ledger extends Answer {
  goals: { environment: string; goal: Foreign }[];
  experiments: Experiment[];
  handoff: Foreign;
}

export interface EnvironmentItem {
  name: string;
  origin: string;
  summary: Foreign;
  tags: string[];
  usable: boolean;
  why_not: Foreign | null;
  runs: number;
  best: Share | null;
}

export interface Environments extends Answer {
  environments: EnvironmentItem[];
  total: number;
  next_cursor: string | null;
}

export interface Environment extends Answer, EnvironmentItem {
  ecosystem: string;
  turns: number | null;
  checks: { name: string; state: Level; what: Foreign }[] | null;
  checked_at: number | null;
  verdict: "ok" | "warning" | "critical" | null;
  runs_here: RunItem[];
}
