// A client's frame: answers come from app tools, through the host. Nothing is pushed, so the page asks every five seconds.
import type { Answer, Change, Now } from "../contract/common.ts";
import { Host, type HostContext } from "./host.ts";
import { type Action, type Done, type Question, Refusal, type Source } from "./source.ts";

const POLL_MS = 5000;
const META = "toprope/page";

interface ToolResult {
  isError?: boolean;
  content?: { type: string; text?: string }[];
  structuredContent?: Record<string, unknown>;
  _meta?: Record<string, unknown>;
}

/** Shake hands with the host that shows the page. */
export async function joinHost(onContext: (context: HostContext) => void): Promise<{ source: Client; opened: Promise<Opened> }> {
  const host = new Host(window.parent);
  let tell: (opened: Opened) => void = () => undefined;
  const opened = new Promise<Opened>((resolve) => (tell = resolve));
  host.on("notifications/tool-result", (params) => tell(openedBy(params as ToolResult)));
  host.on("notifications/host-context-changed", (params) => {
    Object.assign(host.context, params);
    onContext(host.context);
  });
  host.on("resource-teardown", () => ({}));
  await host.connect();
  onContext(host.context);
  return { source: new Client(host), opened };
}

/** What `show` was called for, and the answer that came with it. */
export interface Opened {
  runId: string | null;
  answer: Answer | null;
}

function openedBy(result: ToolResult): Opened {
  const told = result.structuredContent ?? {};
  return {
    runId: told.screen === "run" && typeof told.run_id === "string" ? told.run_id : null,
    answer: (result._meta?.[META] as Answer | undefined) ?? null,
  };
}

export class Client implements Source {
  readonly place = "client";
  readonly screens = ["now", "runs", "compare", "rope"];
  readOnly = false;
  private given: Answer | null = null;

  constructor(private readonly host: Host) {}

  /** An answer that came with the result of `show`; it is given to the first question that it answers. */
  keep(answer: Answer | null): void {
    this.given = answer;
  }

  async ask<T extends Answer>(question: Question): Promise<T> {
    const given = this.given as (Answer & { run_id?: string }) | null;
    if (given && given.what === question.what && given.run_id === question.run_id && !question.after) {
      this.given = null;
      return this.noted(given) as T;
    }
    const result = await this.call("look", question);
    return this.noted(result.structuredContent as unknown as Answer) as T;
  }

  /** Learn from an answer that the server only shows. */
  private noted(answer: Answer): Answer {
    if (answer.what === "now") this.readOnly = (answer as Now).read_only;
    return answer;
  }

  async act(action: Action): Promise<Done> {
    if (action.do !== "stop") throw new Refusal("Only the dashboard can do that.", "The owner opens it with 'toprope dashboard'.");
    const result = await this.call("stop_training", { run_id: action.run_id });
    return { done: true, said: result.content?.find((block) => block.type === "text")?.text?.split("\n")[0] ?? "Stopping." };
  }

  follow(changed: (change: Change) => void): void {
    setInterval(() => !document.hidden && changed({ all: true }), POLL_MS);
  }

  async askAgent(text: string): Promise<void> {
    const answer = await this.host.request("ui/message", { role: "user", content: [{ type: "text", text }] });
    if (answer.isError) throw new Refusal("The client did not take the message.");
  }

  get enlarge(): (() => Promise<void>) | undefined {
    const { availableDisplayModes = [], displayMode } = this.host.context;
    if (!availableDisplayModes.includes("fullscreen") || displayMode === "fullscreen") return undefined;
    return async () => void (await this.host.request("ui/request-display-mode", { mode: "fullscreen" }));
  }

  /** Tell the host how tall the page is, whenever that changes. */
  reportSize(node: HTMLElement): void {
    let last = 0;
    new ResizeObserver(() => {
      const height = Math.ceil(node.getBoundingClientRect().height);
      if (Math.abs(height - last) < 2) return;
      last = height;
      this.host.notify("ui/notifications/size-changed", { height, width: Math.ceil(node.getBoundingClientRect().width) });
    }).observe(node);
  }

  private async call(name: string, parameters: Record<string, unknown>): Promise<ToolResult> {
    let result: ToolResult;
    try {
      result = (await this.host.request("tools/call", { name, arguments: parameters })) as ToolResult;
    } catch (error) {
      throw new Refusal(error instanceof Error ? error.message : String(error));
    }
    if (!result.isError) return result;
    const text = result.content?.find((block) => block.type === "text")?.text ?? `${name} failed.`;
    throw new Refusal(text.split("\n")[0]!, text.split("\n").slice(1, 3).join(" "));
  }
}
