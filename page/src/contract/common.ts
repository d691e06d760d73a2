// What every answer of the server is made of. Times are seconds since the epoch, shares go from 0 to 1; null is unknown.

/** Text of environments, models, logs, agents and programs. It is shown by `Text` and used for nothing else. */
export interface Foreign {
  foreign: string;
}

export type Level = "note" | "warning" | "critical";
export type State =
  | "queued"
  | "validating"
  | "starting"
  | "training"
  | "evaluating"
  | "stopping"
  | "paused"
  | "completed"
  | "stopped"
  | "failed"
  | "lost";

export interface Share {
  value: number;
  low: number | null;
  high: number | null;
  tasks: number;
}

export interface Answer {
  version: number;
  what: string;
  /** The server's clock. */
  at: number;
}

export interface RunItem {
  run_id: string;
  kind: string;
  title: string;
  detail: string;
  environment: string;
  state: State;
  live: boolean;
  created_at: number;
  started_at: number | null;
  ended_at: number | null;
  accuracy: Share | null;
  before: number | null;
  finding: { rule: string; level: Level } | null;
  progress: {
    step: number | null;
    total_steps: number | null;
    reward: number | null;
    success: number | null;
    eta_s: number | null;
    share: number | null;
    what: string | null;
    done: number | null;
    total: number | null;
  };
  spark: (number | null)[] | null;
}

export interface Runs extends Answer {
  runs: RunItem[];
  total: number;
  next_cursor: string | null;
}

export interface Ask {
  hash: string;
  text: string;
  at: number;
  expires_at: number;
  approved: boolean;
  details: null | {
    what: string;
    why: string;
    environment: string;
    draft_id: string | null;
    /** Fields that differ from the preset, with their values. */
    changes?: string;
    runs: number;
    steps: number;
    caps: Record<string, number>;
    estimates: Record<string, { value: number; low: number; high: number } | null>;
  };
}

export interface Call {
  n: number;
  at: number;
  by: Foreign;
  tool: Foreign;
  arguments: Foreign;
  outcome: "done" | "refused" | "failed" | "asked";
  said: Foreign | null;
  ms: number | null;
  run_ids: string[];
}

export interface Rope {
  limits_file: string;
  locks_file: string;
  /** The owner's files are here; others ship with Toprope. */
  folder: string;
  confirm_by: string;
  confirm: string;
  limits: { name: string; label: string; unit: string; max: number; used: number | null; reason: Foreign | null }[];
  locks: { field: string; says: Foreign; reason: Foreign }[];
}

export interface Now extends Answer {
  read_only: boolean;
  may_act: boolean;
  waiting: Ask[];
  live: RunItem[];
  best: { run: RunItem; before: Share | null; accuracy: Share }[];
  diary: Call[];
  rope: Rope;
  last_end: number | null;
  today: { runs: number; cpu_hours: number; gpu_hours: number; cost_usd: number | null };
  frozen: { reason: Foreign; at: number } | null;
  counts: { runs: number; live: number; sweeps: number };
}

/** What changed, as the event stream tells it. */
export interface Change {
  runs?: Record<string, string[]>;
  list?: boolean;
  asks?: boolean;
  diary?: boolean;
  ledger?: boolean;
  limits?: boolean;
  locks?: boolean;
  /** Anything may have changed. */
  all?: boolean;
}
