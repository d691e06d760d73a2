// A bare host of MCP Apps for tests: the page in a sandboxed frame with the policy that hosts set by default. It is bundled
// for the browser; `callTool` is a function of the test, which asks the real server.
import { AppBridge, PostMessageTransport } from "@modelcontextprotocol/ext-apps/app-bridge";

window.messages = [];
window.sizes = [];

window.show = async (html, result, theme) => {
  document.querySelector("iframe")?.remove();
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.style.cssText = "width: 760px; height: 900px; border: 0";
  document.body.append(frame);
  const bridge = new AppBridge(
    null,
    { name: "bare host", version: "1" },
    { openLinks: {}, serverTools: {}, message: {} },
    { hostContext: { theme, displayMode: "inline", availableDisplayModes: ["inline", "fullscreen"], locale: "en" } },
  );
  bridge.oncalltool = (params) => window.callTool(params);
  bridge.onmessage = async (params) => (window.messages.push(params), {});
  bridge.onsizechange = ({ height }) => {
    window.sizes.push(height);
    frame.style.height = `${height}px`;
  };
  bridge.onrequestdisplaymode = async ({ mode }) => ({ mode });
  bridge.oninitialized = async () => {
    await bridge.sendToolInput({ arguments: {} });
    await bridge.sendToolResult(result);
  };
  window.bridge = bridge;
  await bridge.connect(new PostMessageTransport(frame.contentWindow, frame.contentWindow));
  frame.srcdoc = html;
};
