// The element of LingBot Live World on its node. What it is and does lies in lingbot_core/web, which knows no ComfyUI.
import { app } from "../../scripts/app.js";

const NODE = "LingBotLiveWorld";
const WIDGET = "live_view";
const TYPE = "LINGBOT_LIVE";
const HEIGHT = 520;
const WIDTH = 460;
const LOOK_EVERY = 400; // milliseconds between looks whether the node got another name

const here = (path) => new URL(`../../${path}`, import.meta.url);

function socketAddress(name) {
  const address = here("v1/live");
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  address.searchParams.set("world", name);
  return address;
}

const language = () => app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en";

let element = null; // the module, once it is asked for

/** Shows the walk of the node's name in `box` as long as the node is in a graph; it may leave it and come back. */
function show(node, box) {
  let live = null;
  let shown = null;
  let timer = 0;

  const look = async () => {
    // A value that comes over a link is not known here; the default is as good as any.
    const name = String(node.widgets?.find((one) => one.name === "name")?.value ?? "live").trim();
    if (name === shown) return;
    shown = name;
    element ??= import(here("lingbot_world/web/live.mjs").href);
    try {
      const { createLive } = await element;
      if (!timer || name !== shown) return; // the node is gone, or has another name by now
      live?.dispose();
      live = createLive({ address: socketAddress(name), language: language() });
      box.replaceChildren(live.element);
    } catch (error) {
      element = null;
      box.textContent = `The live view could not be loaded (${error.message}). Load the page again.`;
    }
  };
  const begin = () => {
    timer ||= setInterval(look, LOOK_EVERY);
  };
  const end = () => {
    clearInterval(timer);
    timer = 0;
    shown = null;
    live?.dispose();
    live = null;
  };
  for (const [event, work] of [["onAdded", begin], ["onRemoved", end]]) {
    const before = node[event];
    node[event] = function (...rest) {
      work();
      return before?.apply(this, rest);
    };
  }
  begin();
}

app.registerExtension({
  name: "LingBotWorld.Live",
  nodeCreated(node) {
    if (node.comfyClass !== NODE) return;
    const box = document.createElement("div");
    box.style.cssText = "width: 100%; height: 100%; overflow: auto";
    const widget = node.addDOMWidget(WIDGET, TYPE, box, { serialize: false, getMinHeight: () => HEIGHT, hideOnZoom: false });
    widget.serialize = false;
    // Nothing to give out: it is not a value.
    widget.serializeValue = () => undefined;
    node.setSize([Math.max(node.size[0], WIDTH), Math.max(node.size[1], node.computeSize()[1])]);
    show(node, box);
  },
});
