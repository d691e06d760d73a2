// Where the page asks: the dashboard's HTTP or a client's messages. The page has no third behaviour.
import type { Answer, Change } from "../contract/common.ts";

/** `what` and its parameters, as the tool `look` takes them. Lists are repeated in an address. */
export type Question = { what: string } & Record<string, string | number | string[] | undefined>;

/** A refusal or a failure, in the server's words. */
export class Refusal extends Error {
  constructor(
    message: string,
    readonly hint = "",
    readonly code = "",
  ) {
    super(message);
  }
}

export type Done = { done: boolean; said: string; run_id?: string; experiment_id?: string; state?: string };

export type Action =
  | { do: "stop"; run_id: string }
  | { do: "resume"; run_id: string; steps?: number; seconds?: number }
  | { do: "answer"; hash: string; answer: "approve" | "refuse" }
  | { do: "note"; note: Record<string, unknown> };

export interface Source {
  readonly place: "browser" | "client";
  /** Questions that this place does not answer are left out of the navigation. */
  readonly screens: readonly string[];
  readonly readOnly: boolean;
  ask<T extends Answer>(question: Question): Promise<T>;
  act(action: Action): Promise<Done>;
  /** Tell of changes. `lost` is called with words when the connection goes, and with none when it comes back. */
  follow(changed: (change: Change) => void, lost: (words: string) => void): void;
  /** Only in a client: say something to the agent; show the page larger. */
  askAgent?(text: string): Promise<void>;
  enlarge?: (() => Promise<void>) | undefined;
}
