// The dashboard's HTTP: a key of one use becomes a token, which every request carries in a header.
import type { Answer, Change } from "../contract/common.ts";
import { type Action, type Done, type Question, Refusal, type Source } from "./source.ts";

const TOKEN = "toprope.token";
const TAB_ANSWERS_MS = 400;
const LONGEST_PAUSE_S = 30;
const OLD_MS = 60_000;
const ANSWER_WITHIN_MS = 30_000;
/** Starting or stopping a run may wait for a cluster. */
const ACT_WITHIN_MS = 120_000;
/** The server sends a sign of life every 15 seconds. */
const SILENT_MS = 40_000;
const RUN_IT = "Run 'toprope dashboard' and open the address that it prints.";
const STARTED_AGAIN = ["This address was used, or the dashboard was started again.", RUN_IT] as const;
const AWAY = ["The dashboard does not answer; the page asks again by itself.", `If it was ended: ${RUN_IT}`] as const;

/** Exchange the key of the address, or take the token of this tab or another one.
 *
 * @throws Refusal: there is neither, or the key was used. */
export async function enter(key: string | null): Promise<Dashboard> {
  const tabs = new BroadcastChannel(TOKEN); // of this dashboard: no other origin hears them
  if (key) {
    const { token, read_only } = (await send("POST", "/api/enter", "", { key })) as { token: string; read_only: boolean };
    sessionStorage.setItem(TOKEN, JSON.stringify([token, read_only]));
  }
  const kept = sessionStorage.getItem(TOKEN) ?? (await tokenOfAnother(tabs));
  if (!kept) throw new Refusal("This page was opened without a key.", RUN_IT, "no_token");
  sessionStorage.setItem(TOKEN, kept);
  tabs.onmessage = ({ data }) => data === "" && tabs.postMessage(sessionStorage.getItem(TOKEN));
  const [token, readOnly] = JSON.parse(kept) as [string, boolean];
  return new Dashboard(token, readOnly);
}

/** What a tab that was opened by a key has: one of its links may have been opened in a tab of its own. */
function tokenOfAnother(tabs: BroadcastChannel): Promise<string | null> {
  return new Promise((resolve) => {
    tabs.onmessage = ({ data }) => data && resolve(data as string);
    tabs.postMessage("");
    setTimeout(() => resolve(null), TAB_ANSWERS_MS);
  });
}

async function send(method: string, path: string, token: string, body?: unknown): Promise<unknown> {
  let response: Response;
  let text: string;
  try {
    response = await fetch(path, request(method, token, body, AbortSignal.timeout(method === "GET" ? ANSWER_WITHIN_MS : ACT_WITHIN_MS)));
    text = await response.text();
  } catch {
    throw new Refusal(...AWAY, "away");
  }
  let answer: { error?: { code?: string; message?: string; hint?: string } } = {};
  try {
    answer = JSON.parse(text);
  } catch {
    if (response.ok) throw new Refusal("The dashboard sent an answer that is not JSON.");
  }
  if (response.ok) return answer;
  const { code = "unexpected", message = `The dashboard answered with status ${response.status}.`, hint = "" } = answer.error ?? {};
  if (code === "key_used" || response.status === 401) {
    sessionStorage.removeItem(TOKEN);
    throw new Refusal(...STARTED_AGAIN, "no_token");
  }
  throw new Refusal(message, hint, code);
}

function request(method: string, token: string, body: unknown, signal: AbortSignal): RequestInit {
  const headers: Record<string, string> = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (method === "POST") Object.assign(headers, { "Content-Type": "application/json", "X-Toprope": "1" });
  return { method, headers, body: body === undefined ? null : JSON.stringify(body), cache: "no-store", signal };
}

/** The address of a question. */
export function addressOf(question: Question): string {
  const { what, ...rest } = question;
  const id = (name: string) => encodeURIComponent(String(rest[name]));
  const [path, used]: [string, string[]] =
    what === "run"
      ? [`/api/run/${id("run_id")}${rest.after ? "/look" : ""}`, ["run_id"]]
      : what === "rollouts"
        ? [`/api/run/${id("run_id")}/rollouts`, ["run_id"]]
        : what === "group"
          ? [`/api/run/${id("run_id")}/group/${id("group")}`, ["run_id", "group"]]
          : what === "log"
            ? [`/api/run/${id("run_id")}/log/${id("component")}`, ["run_id", "component"]]
            : what === "sweep"
              ? [`/api/sweep/${id("run_id")}`, ["run_id"]]
              : what === "dataset"
                ? [`/api/dataset/${id("name")}`, ["name"]]
                : [`/api/${what}`, []];
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(rest)) {
    if (used.includes(name) || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, String(one));
  }
  return query.size ? `${path}?${query}` : path;
}

export class Dashboard implements Source {
  readonly place = "browser";
  readonly screens = ["now", "runs", "compare", "sweeps", "datasets", "ledger", "environments", "rope"];

  constructor(
    private readonly token: string,
    readonly readOnly: boolean,
  ) {}

  async ask<T extends Answer>(question: Question): Promise<T> {
    return (await send("GET", addressOf(question), this.token)) as T;
  }

  async act(action: Action): Promise<Done> {
    const [path, body]: [string, unknown] =
      action.do === "stop"
        ? [`/api/run/${encodeURIComponent(action.run_id)}/stop`, {}]
        : action.do === "resume"
          ? [`/api/run/${encodeURIComponent(action.run_id)}/resume`, { steps: action.steps, seconds: action.seconds }]
          : action.do === "answer"
            ? [`/api/ask/${encodeURIComponent(action.hash)}`, { answer: action.answer }]
            : ["/api/note", action.note];
    return (await send("POST", path, this.token, body)) as Done;
  }

  // EventSource cannot send a header, so the stream is read by fetch.
  async follow(changed: (change: Change) => void, lost: (words: string) => void): Promise<void> {
    let after = "";
    let pause = 0;
    // What a page says of ages grows old while nothing changes.
    setInterval(() => changed({ all: true }), OLD_MS);
    for (;;) {
      const silence = new AbortController();
      let timer = 0;
      const heard = () => {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENT_MS) as unknown as number;
      };
      heard();
      try {
        const response = await fetch(`/api/events${after ? `?after=${after}` : ""}`, request("GET", this.token, undefined, silence.signal));
        if (response.status === 401) return lost(STARTED_AGAIN.join(" "));
        if (!response.ok || !response.body) throw new Error();
        for await (const message of messagesOf(response.body, heard)) {
          if (message.event === "hello") {
            lost("");
            // What happened while the stream was away may be older than what it can still tell.
            if (pause) changed({ all: true });
            pause = 0;
            after ||= String((JSON.parse(message.data) as { cursor: number }).cursor);
          } else if (message.event === "change") {
            after = message.id || after;
            changed(JSON.parse(message.data) as Change);
          }
        }
      } catch {
        // said below
      }
      clearTimeout(timer);
      lost(AWAY.join(" "));
      pause = Math.min(pause * 2 || 1, LONGEST_PAUSE_S);
      await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    }
  }
}

interface StreamMessage {
  event: string;
  id: string;
  data: string;
}

/** The messages of an event stream (HTML standard, section 9.2). */
async function* messagesOf(body: ReadableStream<Uint8Array>, heard: () => void): AsyncGenerator<StreamMessage> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    rest += value;
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const message: StreamMessage = { event: "message", id: "", data: "" };
      for (const line of block.split(/\r?\n/)) {
        const [, name, text] = /^(\w+): ?(.*)$/.exec(line) ?? [];
        if (name === "event" || name === "id") message[name] = text!;
        if (name === "data") message.data += text;
      }
      if (message.data) yield message;
    }
  }
}
