// The page's end of MCP Apps (extension io.modelcontextprotocol/ui, 2026-01-26): JSON-RPC by postMessage to the host.

const PROTOCOL = "2026-01-26";
const ANSWER_WITHIN_MS = 30_000;

export interface HostContext {
  theme?: "light" | "dark";
  displayMode?: string;
  availableDisplayModes?: string[];
  containerDimensions?: { height?: number; maxHeight?: number; width?: number; maxWidth?: number };
}

type Params = Record<string, unknown>;
interface Message {
  jsonrpc: "2.0";
  id?: number | string;
  method?: string;
  params?: Params;
  result?: Params;
  error?: { code: number; message: string };
}

export class Host {
  capabilities: Params = {};
  context: HostContext = {};
  private next = 1;
  private readonly waiting = new Map<number | string, (message: Message) => void>();
  private readonly heard = new Map<string, (params: Params) => unknown>();

  constructor(private readonly parent: Window) {
    addEventListener("message", (event) => {
      if (event.source === parent) this.receive(event.data as Message);
    });
  }

  /** Tell what to do when the host sends a notification or asks something. */
  on(method: string, handler: (params: Params) => unknown): void {
    this.heard.set(`ui/${method}`, handler);
  }

  /** The handshake; afterwards the host sends the input and the result of the tool that opened the page. */
  async connect(): Promise<void> {
    const answer = await this.request("ui/initialize", {
      protocolVersion: PROTOCOL,
      appInfo: { name: "toprope", version: "1" },
      appCapabilities: { availableDisplayModes: ["inline", "fullscreen"] },
    });
    this.capabilities = (answer.hostCapabilities as Params) ?? {};
    this.context = (answer.hostContext as HostContext) ?? {};
    this.notify("ui/notifications/initialized", {});
  }

  request(method: string, params: Params): Promise<Params> {
    const id = this.next++;
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => {
        this.waiting.delete(id);
        reject(new Error(`The client did not answer ${method} within ${ANSWER_WITHIN_MS / 1000} s.`));
      }, ANSWER_WITHIN_MS);
      this.waiting.set(id, (message) => {
        clearTimeout(late);
        this.waiting.delete(id);
        if (message.error) reject(new Error(message.error.message));
        else resolve(message.result ?? {});
      });
      this.post({ jsonrpc: "2.0", id, method, params });
    });
  }

  notify(method: string, params: Params): void {
    this.post({ jsonrpc: "2.0", method, params });
  }

  // The frame's parent has an origin that the page cannot know; nothing sent here is secret to the host.
  private post(message: Message): void {
    this.parent.postMessage(message, "*");
  }

  private receive(message: Message): void {
    if (message?.jsonrpc !== "2.0") return;
    if (message.method === undefined) {
      if (message.id !== undefined) this.waiting.get(message.id)?.(message);
      return;
    }
    const handler = this.heard.get(message.method);
    const result = handler?.(message.params ?? {});
    if (message.id === undefined) return;
    if (handler || message.method === "ping") {
      void Promise.resolve(result).then((value) => this.post({ jsonrpc: "2.0", id: message.id, result: (value as Params) ?? {} }));
    } else {
      this.post({ jsonrpc: "2.0", id: message.id, error: { code: -32601, message: `no ${message.method} here` } });
    }
  }
}
